"""Endpoint of imports: an archive of a PEFT adapter becomes a checkpoint of its sender, by a job."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from api.acting import record_act
from api.archive_body import store_body
from api.archive_parts import ArchivePart
from api.authentication import CheckpointWriter
from api.route_bounds import STREAMED_BODY, Holding, bounded
from api.services import ApiServices, Services
from api.weft.jobs import KEY_PATTERN, IdempotencyKey, JobInfo, describe_job
from api.wire.request_model import NO_NUL
from contracts.errors import BodyTooSlow, Forbidden, InvalidRequest, Unavailable, WeftError
from contracts.paths import Segment, check_name
from contracts.weight_jobs import ImportRequest, JobKind
from ledger.wakeups import JOBS
from tenants.audit_actions import Action
from tenants.checkpoints import check_ttl
from tenants.projects import project_of_new
from tenants.rights import Principal
from tenants.weight_jobs import (
    ARCHIVE,
    NewJob,
    add_import,
    check_archive,
    check_import,
    check_repeated_import,
    job_of_key,
    new_job_id,
    staged_folder,
)

router = APIRouter(tags=["jobs"])

_ARCHIVE_BODY: dict[str, Any] = {
    "requestBody": {
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        "required": True,
    }
}


class ReceivedBytes(BaseModel):
    """Bytes of an archive that have come before its upload broke off."""

    received_bytes: int


@router.get("/imports/received")
async def describe_received(
    caller: CheckpointWriter,
    services: Services,
    idempotency_key: Annotated[str, Header(pattern=KEY_PATTERN)],
) -> ReceivedBytes:
    """Tell how much has come of the archive whose upload, under this ``Idempotency-Key`` and API key, has broken off.

    0 if nothing is kept: of each tenant the newest such upload is, for a day at most.
    """
    part = ArchivePart(services.runtime.data_folder, caller, idempotency_key)
    return ReceivedBytes(received_bytes=await asyncio.to_thread(part.received))


@router.post("/imports", status_code=202, openapi_extra=_ARCHIVE_BODY)
@bounded(body=STREAMED_BODY, holding=Holding.STREAM, goes_on=True)
async def import_archive(
    caller: CheckpointWriter,
    services: Services,
    request: Request,
    base_model: Annotated[str, Query(pattern=NO_NUL)],
    name: Annotated[str, Query()] = "imported",
    segment: Annotated[Literal["weights", "sampler_weights"], Query()] = "weights",
    ttl_seconds: Annotated[int | None, Query()] = None,
    project_id: Annotated[str | None, Query(pattern=NO_NUL)] = None,
    upload_offset: Annotated[int, Header(ge=0, le=2**63 - 1)] = 0,
    idempotency_key: IdempotencyKey = None,
) -> JobInfo:
    """Have an adapter of PEFT's taken in as a checkpoint: the body is its archive, a tar, plain or gzip.

    A repeat under the same ``Idempotency-Key`` returns the job that the first request has made, without reading the archive
    again. With ``Upload-Offset`` it goes on with an upload that broke off: the body is what comes after so many bytes.
    ``project_id`` names the checkpoint's project; null is the default one, or the one that the key is for.

    Raises ``Forbidden``, ``UnknownBaseModel``, ``InvalidRequest``, ``TooManyOperations``, ``TooManyRequests``,
    ``StorageFull``, ``PayloadTooLarge``, ``BodyTooSlow``, ``SequenceConflict``.
    """
    caller.check_base(services.base(base_model).name)
    if caller.rights.max_rank is not None:
        raise Forbidden(
            "this key makes adapters up to a rank, and an archive's is not known yet; import with another key"
        )
    asked = ImportRequest(check_name(name, "name"), Segment(segment), 0, check_ttl(ttl_seconds))
    async with services.runtime.database.read() as session:
        project = await project_of_new(session, caller, project_id)
        new = NewJob(new_job_id(), services.base(base_model).name, idempotency_key, project, opened_by=caller.key_id)
        if (earlier := await job_of_key(session, caller.reach, idempotency_key)) is not None:
            length = request.headers.get("content-length", "")
            is_known = length.isascii() and length.isdigit() and len(length) < 20
            announced = upload_offset + int(length) if is_known else 0
            check_repeated_import(earlier, new, replace(asked, archive_bytes=announced))
            return describe_job(earlier)
    caller.check_new_work()
    async with services.admission.uploads.held(caller.tenant, patience=0, what="archives that are sent"):
        # Counted before the archive is read.
        services.admission.changes.count(caller.tenant)
        size = await _staged(services, caller, request, new, upload_offset)
        info = await _recorded(services, caller, new, replace(asked, archive_bytes=size))
    services.runtime.wakeups.announce(JOBS)
    return info


async def _staged(services: ApiServices, caller: Principal, request: Request, job: NewJob, offset: int) -> int:
    """Write the body to the job's folder and return the archive's bytes.

    The folder goes if the body does not come whole, and once the caller's key has ended or its tenant is blocked. What has come
    is kept if the request has an ``Idempotency-Key`` and its caller goes on.
    """
    runtime = services.runtime
    async with runtime.database.read() as session:
        room = await check_import(session, caller.tenant, job.project, services.limits)
    check = partial(check_archive, most=runtime.settings.max_import_bytes, room=room)
    idle, folder = runtime.settings.body_timeout.total_seconds(), staged_folder(job.id)
    target = runtime.data_folder.path(folder) / ARCHIVE
    part = None if job.key is None else ArchivePart(runtime.data_folder, caller, job.key)
    if offset and part is None:
        raise InvalidRequest("Upload-Offset: send the Idempotency-Key of the upload that broke off, too")
    if part is not None:
        await asyncio.to_thread(part.take, target, offset) if offset else await asyncio.to_thread(part.drop)
    is_ended = services.ended_keys.of(caller.tenant, caller.key_id)
    try:
        return await store_body(request, target, check, idle_seconds=idle, is_ended=is_ended, offset=offset)
    except (ClientDisconnect, BodyTooSlow, Unavailable, asyncio.CancelledError):
        if part is not None and target.exists() and not is_ended():
            await asyncio.to_thread(part.keep, target)
        await asyncio.to_thread(runtime.data_folder.remove, folder)
        raise
    except BaseException:
        await asyncio.to_thread(runtime.data_folder.remove, folder)
        raise


async def _recorded(services: ApiServices, caller: Principal, new: NewJob, asked: ImportRequest) -> JobInfo:
    """Record the job and describe it; the folder goes if it is refused."""
    runtime = services.runtime
    try:
        async with runtime.database.write() as transaction:
            job = await add_import(transaction, new, caller.reach, asked, defaults=services.limits, clock=runtime.clock)
            info, session = describe_job(job), job.session_id
            if info.id == new.id:
                told = {"kind": JobKind.IMPORT, "name": asked.name, "archive_bytes": asked.archive_bytes}
                await record_act(
                    transaction,
                    services,
                    caller,
                    Action.JOB_CREATE,
                    new.id,
                    session_id=session,
                    after=told,
                    is_counted=True,
                )
    except Unavailable:
        # The job may have been recorded. Housekeeping removes the folder if not.
        raise
    except WeftError:
        await asyncio.to_thread(runtime.data_folder.remove, staged_folder(new.id))
        raise
    if info.id != new.id:
        # The same request has come to another process meanwhile.
        await asyncio.to_thread(runtime.data_folder.remove, staged_folder(new.id))
    return info
