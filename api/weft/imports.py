"""Endpoint of imports: an archive of a PEFT adapter becomes a checkpoint of its sender, by a job."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from api.archive_body import store_body
from api.authentication import CheckpointWriter
from api.route_bounds import STREAMED_BODY, Holding, bounded
from api.services import ApiServices, Services
from api.weft.jobs import IdempotencyKey, JobInfo, describe_job
from api.wire.request_model import NO_NUL
from contracts.errors import Forbidden, Unavailable, WeftError
from contracts.paths import Segment, check_name
from contracts.weight_jobs import ImportRequest
from ledger.wakeups import JOBS
from tenants.checkpoints import check_ttl
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


@router.post("/imports", status_code=202, openapi_extra=_ARCHIVE_BODY)
@bounded(body=STREAMED_BODY, holding=Holding.STREAM)
async def import_archive(
    caller: CheckpointWriter,
    services: Services,
    request: Request,
    base_model: Annotated[str, Query(pattern=NO_NUL)],
    name: Annotated[str, Query()] = "imported",
    segment: Annotated[Literal["weights", "sampler_weights"], Query()] = "weights",
    ttl_seconds: Annotated[int | None, Query()] = None,
    idempotency_key: IdempotencyKey = None,
) -> JobInfo:
    """Have an adapter of PEFT's taken in as a checkpoint: the body is its archive, a tar, plain or gzip.

    A repeat under the same ``Idempotency-Key`` returns the job that the first request has made, without reading the archive
    again. Raises ``UnknownBaseModel``, ``InvalidRequest``, ``TooManyOperations``, ``TooManyRequests``, ``StorageFull``,
    ``PayloadTooLarge``, ``BodyTooSlow``, ``SequenceConflict``.
    """
    caller.check_default_project()
    caller.check_base(services.base(base_model).name)
    if caller.rights.max_rank is not None:
        raise Forbidden(
            "this key makes adapters up to a rank, and an archive's is not known yet; import with another key"
        )
    new = NewJob(new_job_id(), services.base(base_model).name, idempotency_key)
    asked = ImportRequest(check_name(name, "name"), Segment(segment), 0, check_ttl(ttl_seconds))
    async with services.runtime.database.read() as session:
        if (earlier := await job_of_key(session, caller.tenant, idempotency_key)) is not None:
            length = request.headers.get("content-length", "")
            announced = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
            check_repeated_import(earlier, new, replace(asked, archive_bytes=announced))
            return describe_job(earlier)
    caller.check_new_work()
    async with services.admission.uploads.held(caller.tenant, patience=0, what="archives that are sent"):
        size = await _staged(services, caller, request, new.id)
        info = await _recorded(services, caller, new, replace(asked, archive_bytes=size))
    services.runtime.wakeups.announce(JOBS)
    return info


async def _staged(services: ApiServices, caller: Principal, request: Request, job: str) -> int:
    """Write the body to the job's folder and return its bytes; the folder goes if the body does not come whole."""
    runtime = services.runtime
    async with runtime.database.read() as session:
        room = await check_import(session, caller.tenant, services.limits)
    check = partial(check_archive, most=runtime.settings.max_import_bytes, room=room)
    idle, folder = runtime.settings.body_timeout.total_seconds(), staged_folder(job)
    try:
        return await store_body(request, runtime.data_folder.path(folder) / ARCHIVE, check, idle_seconds=idle)
    except BaseException:
        await asyncio.to_thread(runtime.data_folder.remove, folder)
        raise


async def _recorded(services: ApiServices, caller: Principal, new: NewJob, asked: ImportRequest) -> JobInfo:
    """Record the job and describe it; the folder goes if it is refused."""
    runtime = services.runtime
    try:
        async with runtime.database.write() as transaction:
            now = runtime.clock()
            info = describe_job(
                await add_import(transaction, new, caller.tenant, asked, defaults=services.limits, now=now)
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
