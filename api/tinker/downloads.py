"""A checkpoint's files over HTTP: as one tar, or each by itself. Links carry their own secret, since downloaders send no key."""

import os
import tarfile
from collections.abc import Iterator
from datetime import datetime
from email.utils import format_datetime
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel

from api.services import ApiServices, Caller, Services
from api.wire.json_body import PathId
from contracts.errors import NotFound
from contracts.ids import TenantId
from contracts.paths import parse_path
from tenants.downloads import Link, linked_directory, make_link

router = APIRouter(tags=["downloads"])

_CHUNK_BYTES = 2**20


class FileUrls(BaseModel):
    """A link to each file of a checkpoint, by its name."""

    urls: dict[str, str]
    expires: datetime


@router.get("/training_runs/{run_id}/checkpoints/{segment}/{name}/archive", status_code=302, response_class=Response)
async def archive(
    caller: Caller, services: Services, request: Request, run_id: PathId, segment: PathId, name: PathId
) -> Response:
    """Where the checkpoint's files are to be had as one tar. Raises ``NotFound``."""
    link = await _link(services, caller, run_id, segment, name)
    headers = {
        "Location": f"{request.base_url}api/v1/downloads/{link.secret}/archive.tar",
        "Expires": format_datetime(link.expires_at, usegmt=True),
    }
    return Response(status_code=302, headers=headers)


@router.get("/training_runs/{run_id}/checkpoints/{segment}/{name}/external_weights_urls")
async def file_urls(
    caller: Caller, services: Services, request: Request, run_id: PathId, segment: PathId, name: PathId
) -> FileUrls:
    """Where each of the checkpoint's files is to be had. Raises ``NotFound``."""
    link = await _link(services, caller, run_id, segment, name)
    base = f"{request.base_url}api/v1/downloads/{link.secret}/files"
    names = [file.name for file in _files(services.data_folder.path(link.directory))]
    return FileUrls(urls={file: f"{base}/{file}" for file in names}, expires=link.expires_at)


@router.get("/downloads/{secret}/archive.tar", response_class=StreamingResponse)
async def download_archive(services: Services, secret: PathId) -> StreamingResponse:
    """The files as a tar, made while it is read. Raises ``NotFound``."""
    folder = await _folder(services, secret)
    return StreamingResponse(_tar(folder), media_type="application/x-tar")


@router.get("/downloads/{secret}/files/{file}", response_class=FileResponse)
async def download_file(services: Services, secret: PathId, file: PathId) -> FileResponse:
    """One of the files. Raises ``NotFound``."""
    found = [path for path in _files(await _folder(services, secret)) if path.name == file]
    if not found:
        raise NotFound(f"the checkpoint has no file {file[:100]!r}")
    return FileResponse(found[0], media_type="application/octet-stream")


async def _link(services: ApiServices, caller: TenantId, run_id: str, segment: str, name: str) -> Link:
    path = parse_path(f"tinker://{run_id}/{segment}/{name}", field="checkpoint_id")
    async with services.database.write() as transaction:
        return await make_link(transaction, caller, path, services.clock)


async def _folder(services: ApiServices, secret: str) -> Path:
    async with services.database.read() as session:
        return services.data_folder.path(await linked_directory(session, secret, services.clock))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def _tar(folder: Path) -> Iterator[bytes]:
    """The folder's files as a tar. Read on a thread; all are opened first, so that a deletion meanwhile cuts none short."""
    opened = [(path, path.open("rb")) for path in _files(folder)]
    try:
        for path, file in opened:
            info = tarfile.TarInfo(path.name)
            info.size, info.mode = os.fstat(file.fileno()).st_size, 0o644
            yield info.tobuf()
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
            yield bytes(-info.size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)
    finally:
        for _, file in opened:
            file.close()
