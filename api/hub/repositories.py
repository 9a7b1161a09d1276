"""Endpoints of the base models' tokenizer and configuration files, read-only and in the Hugging Face hub's form.

With ``HF_ENDPOINT`` set to the service and ``HF_TOKEN`` to an API key, ``AutoTokenizer`` finds the tokenizers here. A revision
may be any: there is one.

Headers and bodies are those that ``huggingface_hub`` 0.x to 2.x reads:
https://huggingface.co/docs/huggingface_hub/package_reference/file_download
"""

from collections.abc import Iterator

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse

from api.authentication import AnyKey
from api.endable_response import EndableResponse
from api.errors import error_response
from api.json_body import PathId
from api.route_bounds import Holding, bounded
from api.services import ApiServices, Services
from api.tokenizer_repositories import TokenizerRepository
from contracts.errors import NotFound

router = APIRouter(tags=["hub"])

_COMMIT = "X-Repo-Commit"


class Sibling(BaseModel):
    """A file's name."""

    rfilename: str


class RepositoryInfo(BaseModel):
    """A repository, with the fields of the hub's answer that clients read."""

    model_config = ConfigDict(protected_namespaces=())

    id: str
    modelId: str
    sha: str
    private: bool = True
    tags: list[str] = []
    siblings: list[Sibling]


@router.get("/api/models/{repository:path}/tree/{revision}/{folder:path}", response_class=JSONResponse)
@bounded(is_counted=False)
async def list_folder(_caller: AnyKey, services: Services, repository: PathId, folder: PathId) -> Response:
    """List the files of a repository's folder. Answers 404 for another folder than chat templates'."""
    found = _find(services, repository)
    if found is None:
        return _no_repository(repository)
    entries = [entry for entry in _entries(found) if str(entry["path"]).startswith(f"{folder.rstrip('/')}/")]
    return JSONResponse(entries, headers={_COMMIT: found.commit}) if entries else _no_file(found, folder)


@router.get("/api/models/{repository:path}/tree/{revision}", response_class=JSONResponse)
@bounded(is_counted=False)
async def list_files(_caller: AnyKey, services: Services, repository: PathId) -> Response:
    """List the files of a repository. Answers 404 for another repository than the served base models'."""
    found = _find(services, repository)
    if found is None:
        return _no_repository(repository)
    return JSONResponse(list(_entries(found)), headers={_COMMIT: found.commit})


@router.get("/api/models/{repository:path}/revision/{revision}", response_model=RepositoryInfo)
@bounded(is_counted=False)
async def get_revision(_caller: AnyKey, services: Services, repository: PathId) -> Response:
    """Describe a repository, as without a revision."""
    return _describe(services, repository)


@router.get("/api/models/{repository:path}", response_model=RepositoryInfo)
@bounded(is_counted=False)
async def get_repository(_caller: AnyKey, services: Services, repository: PathId) -> Response:
    """Describe a repository: its commit and the names of its files."""
    return _describe(services, repository)


@router.head("/{repository:path}/resolve/{revision}/{file:path}", include_in_schema=False)
@router.get("/{repository:path}/resolve/{revision}/{file:path}", response_class=FileResponse)
@bounded(holding=Holding.STREAM, is_counted=False)
async def get_file(caller: AnyKey, services: Services, repository: PathId, file: PathId) -> Response:
    """Send a file, and break off if its key ends. ``HEAD`` tells of its size and, as ``ETag``, its content's SHA-256."""
    found = _find(services, repository)
    if found is None:
        return _no_repository(repository)
    held = found.files.get(file)
    if held is None:
        return _no_file(found, file)
    headers = {_COMMIT: found.commit, "ETag": f'"{held.digest}"', "X-Linked-Size": str(held.size_bytes)}
    content = FileResponse(held.path, headers=headers, media_type="application/octet-stream")
    return EndableResponse(content, services.ended_keys.of(caller.tenant, caller.key_id))


def _find(services: ApiServices, repository: str) -> TokenizerRepository | None:
    return services.tokenizers.get(repository)


def _describe(services: ApiServices, repository: str) -> Response:
    found = _find(services, repository)
    if found is None:
        return _no_repository(repository)
    siblings = [Sibling(rfilename=name) for name in found.files]
    info = RepositoryInfo(id=repository, modelId=repository, sha=found.commit, siblings=siblings)
    return JSONResponse(info.model_dump(), headers={_COMMIT: found.commit})


def _entries(found: TokenizerRepository) -> Iterator[dict[str, str | int]]:
    """Yield the repository's files and folders as the hub's tree has them."""
    for folder in sorted({name.rpartition("/")[0] for name in found.files if "/" in name}):
        yield {"type": "directory", "oid": found.commit, "size": 0, "path": folder}
    for name, file in found.files.items():
        yield {"type": "file", "oid": file.digest, "size": file.size_bytes, "path": name}


def _no_repository(repository: str) -> Response:
    text = f"weft serves the tokenizers of its base models only, and none is named {repository[:200]!r}"
    return _refusal(text, {"X-Error-Code": "RepoNotFound"})


def _no_file(found: TokenizerRepository, file: str) -> Response:
    text = f"the base model has no tokenizer or configuration file {file[:200]!r}; weights are not served"
    return _refusal(text, {"X-Error-Code": "EntryNotFound", _COMMIT: found.commit})


def _refusal(text: str, headers: dict[str, str]) -> Response:
    """Return a 404 that a Hugging Face client understands, with the body of every other error."""
    answer = error_response(NotFound.status, detail=text, code=NotFound.code, retryable=False)
    answer.headers.update(headers | {"X-Error-Message": text.encode("ascii", "replace").decode()})
    return answer
