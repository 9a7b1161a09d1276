"""Endpoints that download a checkpoint's files, as one tar or one by one.

A link carries a secret of its own, because the programs that download send no API key.
"""

import asyncio
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from email.utils import format_datetime
from pathlib import Path
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel

from api.acting import record_act
from api.authentication import Downloader
from api.endable_response import EndableResponse
from api.json_body import PathId
from api.public_address import public_address
from api.route_bounds import Holding, bounded
from api.security_events import note_access, note_download
from api.services import ApiServices, Services
from contracts.errors import FilesUnread, NotFound
from contracts.paths import CheckpointPath, parse_path
from store.fair_places import ask_for
from store.folder_files import files_of
from telemetry.security import SecurityEvent
from tenants.audit import session_of
from tenants.audit_actions import Action
from tenants.downloads import FollowedLink, Link, follow_link, make_link
from tenants.rights import Principal

router = APIRouter(tags=["downloads"])

T = TypeVar("T")

_CHUNK_BYTES = 2**20
COMPLETE = "checkpoint_complete"
"""Empty last file of an archive. SDKs before 0.36 take an archive without it for one that was cut short."""


class FileUrls(BaseModel):
    """Links to a checkpoint's files by file name, and the time at which they expire."""

    urls: dict[str, str]
    expires: datetime


@router.get("/training_runs/{run_id}/checkpoints/{segment}/{name}/archive", status_code=302, response_class=Response)
async def archive(
    caller: Downloader, services: Services, request: Request, run_id: PathId, segment: PathId, name: PathId
) -> Response:
    """Redirect to a link to the checkpoint's files as one tar. Raises ``NotFound``."""
    address = public_address(request, services.runtime.settings)
    link = await _link(services, caller, request, _address(run_id, segment, name), purpose="archive")
    headers = {
        "Location": f"{address}/api/v1/downloads/{link.secret}/archive.tar",
        "Expires": format_datetime(link.expires_at, usegmt=True),
    }
    return Response(status_code=302, headers=headers)


@router.get("/training_runs/{run_id}/checkpoints/{segment}/{name}/external_weights_urls")
async def file_urls(
    caller: Downloader, services: Services, request: Request, run_id: PathId, segment: PathId, name: PathId
) -> FileUrls:
    """Return a link to each of the checkpoint's files. Raises ``NotFound``, ``FilesUnread``."""
    address = public_address(request, services.runtime.settings)
    link = await _link(services, caller, request, _address(run_id, segment, name), purpose="files")
    base = f"{address}/api/v1/downloads/{link.secret}/files"
    names = await _seen(files_of, services.runtime.data_folder.path(link.directory))
    return FileUrls(urls={file: f"{base}/{file}" for file in names}, expires=link.expires_at)


@router.get("/downloads/{secret}/archive.tar", response_class=StreamingResponse)
@bounded(holding=Holding.STREAM)
async def download_archive(services: Services, request: Request, secret: PathId) -> Response:
    """Download the files behind a link as a tar, built while it is sent. Raises ``NotFound``, ``FilesUnread``."""
    link, folder, is_ended = await _followed(services, request, secret)
    pieces = await _seen(_archive, folder)
    note_download(request, link, "archive.tar")
    headers = {"content-disposition": 'attachment; filename="checkpoint.tar"'}
    answer = StreamingResponse(pieces, media_type="application/x-tar", headers=headers)
    return EndableResponse(answer, is_ended)


@router.get("/downloads/{secret}/files/{file:path}", response_class=FileResponse)
@bounded(holding=Holding.STREAM)
async def download_file(services: Services, request: Request, secret: PathId, file: PathId) -> Response:
    """Download one of the files behind a link. Raises ``NotFound``, ``FilesUnread``."""
    link, folder, is_ended = await _followed(services, request, secret)
    found = (await _seen(files_of, folder)).get(file)
    if found is None:
        raise NotFound(f"the checkpoint has no file {file[:100]!r}; external_weights_urls lists its files")
    note_download(request, link, file)
    # No name: an imported file may have any, and the address ends with it.
    headers = {"content-disposition": "attachment"}
    answer = FileResponse(found, media_type="application/octet-stream", headers=headers)
    return EndableResponse(answer, is_ended)


def _address(run_id: str, segment: str, name: str) -> CheckpointPath:
    return parse_path(f"tinker://{run_id}/{segment}/{name}", field="checkpoint_id")


async def _link(
    services: ApiServices, caller: Principal, request: Request, path: CheckpointPath, *, purpose: str
) -> Link:
    async with services.runtime.database.write() as transaction:
        link = await make_link(transaction, caller.reach, path, services.runtime.clock, key_id=caller.key_id)
        await record_act(
            transaction,
            services,
            caller,
            Action.CHECKPOINT_READ,
            str(path),
            session_id=session_of(path.run_id),
            after={"purpose": purpose, "link_expires_at": link.expires_at},
        )
    note_access(request, SecurityEvent.LINK_MADE, str(path))
    return link


async def _followed(
    services: ApiServices, request: Request, secret: str
) -> tuple[FollowedLink, Path, Callable[[], bool]]:
    """Return the link, the folder behind it, and a function that tells whether the link would be refused by now.

    The download counts as a stream of the link's tenant, and waits until it has few others in progress. Raises ``NotFound``,
    ``TooManyRequests``.
    """
    async with services.runtime.database.read() as session:
        link = await follow_link(session, secret, services.runtime.clock)
    ask_for(link.tenant)
    await services.admission.enter(link.tenant, request.scope)
    await services.admission.hold_download(link.tenant, request.scope)
    folder = services.runtime.data_folder.path(link.directory)
    return link, folder, services.ended_keys.of(link.tenant, link.key_id)


async def _seen(look: Callable[[Path], T], folder: Path) -> T:
    """Return what ``look`` finds of a checkpoint's folder, on a thread. Raises ``FilesUnread``.

    The checkpoint is recorded, so its files are there: what cannot be seen is away for a while.
    """
    try:
        return await asyncio.to_thread(look, folder)
    except OSError as error:
        raise FilesUnread("the checkpoint's files cannot be read now; send the request again later") from error


def _archive(folder: Path) -> Iterator[bytes]:
    """Return the folder's files as a tar, piece by piece; all of them are open, so a deletion meanwhile cuts none short.

    They are closed with the iterator, also when nothing is read of it.
    """
    pieces = _tar(folder)
    next(pieces)
    return pieces


def _tar(folder: Path) -> Iterator[bytes]:
    """Yield nothing once the files are open, and then the tar; called on threads."""
    with ExitStack() as files:
        opened = {name: files.enter_context(path.open("rb")) for name, path in files_of(folder).items()}
        yield b""
        for name, file in opened.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = os.fstat(file.fileno()).st_size, 0o644
            yield info.tobuf()
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
            yield bytes(-info.size % tarfile.BLOCKSIZE)
        yield tarfile.TarInfo(COMPLETE).tobuf()
        yield bytes(2 * tarfile.BLOCKSIZE)
