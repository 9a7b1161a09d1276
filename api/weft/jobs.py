"""Endpoints of jobs on weights: merge a checkpoint into its base, follow a job, cancel it."""

import asyncio
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query
from pydantic import BaseModel

from api.acting import record_act
from api.authentication import CheckpointWriter, JobReader
from api.json_body import PathId, json_body
from api.route_bounds import bounded
from api.services import Services
from api.wire.request_model import PlainText, RequestModel
from contracts.errors import InvalidRequest
from contracts.paths import Segment, check_name, parse_path
from contracts.weight_jobs import JobKind, MergeRequest
from ledger.wakeups import JOBS
from store.tables import WeightJob
from tenants import weight_jobs
from tenants.audit import session_of
from tenants.audit_actions import Action
from tenants.checkpoints import check_ttl, find_checkpoint

router = APIRouter(tags=["jobs"])


KEY_PATTERN = r"^[!-~]{1,200}$"
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", pattern=KEY_PATTERN)]
"""Header by which a client names its request: a repeat under the same key starts no second job."""


class MergeBody(RequestModel):
    """Body of ``/merges``: checkpoint to merge, and name of the external weights that it is saved as."""

    path: PlainText
    name: PlainText
    ttl_seconds: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


class JobError(BaseModel):
    """Reason why a job failed or was cancelled."""

    code: str
    message: str


class JobInfo(BaseModel):
    """A job. ``path`` is what it made; ``total_bytes`` is 0 until it is known."""

    id: str
    kind: str
    state: str
    base_model: str
    path: str | None
    done_bytes: int
    total_bytes: int
    attempts: int
    created_at: datetime
    finished_at: datetime | None
    is_cancelling: bool
    error: JobError | None


class JobList(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobInfo]


@router.post("/merges", status_code=202)
async def merge(
    caller: CheckpointWriter,
    services: Services,
    body: Annotated[MergeBody, json_body(MergeBody)],
    idempotency_key: IdempotencyKey = None,
) -> JobInfo:
    """Have a checkpoint merged into its base, as external weights of its run: a Hugging Face model folder.

    A repeat under the same ``Idempotency-Key`` returns the job that the first request has made; so does a request without a
    key while a job that does the same is unfinished. Raises ``NotFound``, ``InvalidRequest``, ``TooManyOperations``,
    ``SequenceConflict``.
    """
    path = parse_path(body.path)
    if path.segment is Segment.EXTERNAL_WEIGHTS:
        raise InvalidRequest("path must be a checkpoint of weights or sampler_weights; external weights are not merged")
    asked = MergeRequest(str(path), check_name(body.name, "name"), check_ttl(body.ttl_seconds), body.dtype)
    runtime = services.runtime
    async with runtime.database.write() as transaction:
        _, run = await find_checkpoint(transaction, caller.reach, path, runtime.clock)
        facts = services.base(run.base_model)
        caller.check_base(facts.name)
        id = weight_jobs.new_job_id()
        job = await weight_jobs.add_merge(
            transaction, caller.reach, facts.name, asked, runtime.clock(), key=idempotency_key, id=id
        )
        info = describe_job(job)
        if info.id == id:
            told = {"kind": JobKind.MERGE, "path": asked.path, "name": asked.name}
            await record_act(
                transaction,
                services,
                caller,
                Action.JOB_CREATE,
                id,
                session_id=session_of(path.run_id),
                after=told,
            )
    runtime.wakeups.announce(JOBS)
    return info


@router.get("/jobs")
async def list_jobs(caller: JobReader, services: Services, limit: Annotated[int, Query(ge=1, le=500)] = 100) -> JobList:
    """List the caller's jobs, of the projects that its key reaches."""
    async with services.runtime.database.survey() as session:
        return JobList(
            jobs=[describe_job(job) for job in await weight_jobs.list_jobs(session, caller.reach, most=limit)]
        )


@router.get("/jobs/{job_id}")
async def get_job(caller: JobReader, services: Services, job_id: PathId) -> JobInfo:
    """Describe a job. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        return describe_job(await weight_jobs.get_job(session, caller.reach, job_id))


@router.delete("/jobs/{job_id}")
@bounded(is_counted=False)
async def cancel_job(caller: CheckpointWriter, services: Services, job_id: PathId) -> JobInfo:
    """Cancel a job: one that waits at once, one that runs within seconds. A finished job stays. Raises ``NotFound``."""
    async with services.runtime.database.write() as transaction:
        job, is_news = await weight_jobs.cancel_job(transaction, caller.reach, job_id, services.runtime.clock())
        info = describe_job(job)
        if is_news:
            await record_act(transaction, services, caller, Action.JOB_CANCEL, job_id, session_id=job.session_id)
    if info.finished_at is not None and info.kind == JobKind.IMPORT:
        # No worker has it, to remove the archive.
        await asyncio.to_thread(services.runtime.data_folder.remove, weight_jobs.staged_folder(info.id))
    return info


def describe_job(job: WeightJob) -> JobInfo:
    """Return the job as its tenant sees it."""
    is_running = job.finished_at is None
    error = None if job.error_code is None else JobError(code=job.error_code, message=job.error_message or "")
    return JobInfo(
        id=job.id,
        kind=job.kind,
        state=job.state,
        base_model=job.base_model,
        path=job.result_path,
        done_bytes=job.done_bytes,
        total_bytes=job.total_bytes,
        attempts=job.attempts,
        created_at=job.created_at,
        finished_at=job.finished_at,
        is_cancelling=is_running and job.cancelled_at is not None,
        error=error,
    )
