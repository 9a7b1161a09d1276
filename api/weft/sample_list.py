"""Endpoint that lists a tenant's finished samples with their reports."""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from api.authentication import SampleReader
from api.long_lists import encoded_list, long_answer
from api.services import Services
from api.wire.request_model import NO_NUL
from tenants.finished_samples import FinishedSample, list_samples

router = APIRouter(tags=["samples"])

DEFAULT_SAMPLES, MOST_SAMPLES = 50, 200


class SampleSummary(BaseModel):
    """A finished sample. All from ``stop_reasons`` on is null or empty for one that failed.

    - ``run``: the run that its sampler follows; ``path``: the checkpoint that its sampler is pinned to.
    - ``stop_reasons``: of each sequence ``stop``, ``length``, or ``abort`` for one that a pause has ended.
    - ``versions``: weights that made its tokens, in the order of use; null is the bare base.
    """

    request_id: str
    sampler_id: str
    run: str | None
    path: str | None
    base_model: str
    state: str
    created_at: datetime
    finished_at: datetime
    prompt_tokens: int
    sampled_tokens: int
    error_code: str | None
    error: str | None
    stop_reasons: list[str]
    versions: list[str | None]
    attempts: int | None
    queue_seconds: float | None
    decode_seconds: float | None


class SampleList(BaseModel):
    """Samples, newest first; ``next`` is what to send as ``after`` for the next page, null on the last one."""

    samples: list[SampleSummary]
    next: str | None


@router.get("/samples", response_model=SampleList)
async def list_finished(
    caller: SampleReader,
    services: Services,
    limit: Annotated[int, Query(ge=1, le=MOST_SAMPLES)] = DEFAULT_SAMPLES,
    after: Annotated[str | None, Query(max_length=100, pattern=NO_NUL)] = None,
) -> Response:
    """List the caller's samples that ended last, as long as their results are kept. Raises ``NotFound`` for a wrong ``after``."""
    async with services.runtime.database.survey() as session:
        page = await list_samples(session, caller.reach, most=limit, after=after)
    return long_answer(samples=await encoded_list(_one_by_one(page.samples), _told), next=page.next)


async def samples_page(caller: SampleReader, services: Services, *, most: int, after: str | None) -> SampleList:
    """Return a page of the caller's samples that ended last as records. Raises ``NotFound`` for a wrong ``after``."""
    async with services.runtime.database.survey() as session:
        found = await list_samples(session, caller.reach, most=most, after=after)
    return SampleList(samples=[_summary(one) for one in found.samples], next=found.next)


async def _one_by_one(samples: list[FinishedSample]) -> AsyncIterator[list[FinishedSample]]:
    for sample in samples:
        yield [sample]


def _told(sample: FinishedSample) -> dict[str, Any]:
    return _summary(sample).model_dump(mode="json")


def _summary(sample: FinishedSample) -> SampleSummary:
    report = sample.report
    return SampleSummary(
        request_id=sample.id,
        sampler_id=sample.sampler,
        run=sample.run,
        path=sample.path,
        base_model=sample.base_model,
        state=sample.state,
        created_at=sample.created_at,
        finished_at=sample.finished_at,
        prompt_tokens=sample.prompt_tokens,
        sampled_tokens=sample.sampled_tokens,
        error_code=sample.error_code,
        error=sample.error_message,
        stop_reasons=report.stop_reasons if report else [],
        versions=report.versions if report else [],
        attempts=report.attempts if report else None,
        queue_seconds=report.queue_seconds if report else None,
        decode_seconds=report.decode_seconds if report else None,
    )
