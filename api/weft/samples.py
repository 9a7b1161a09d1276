"""Endpoint that reports on a finished sample: the weights that made each token, the replicas, and the time it took."""

from fastapi import APIRouter
from pydantic import BaseModel

from api.authentication import SampleReader
from api.json_body import PathId
from api.services import Services
from contracts.sample_report import SampleReport
from tenants.sample_reports import report_of

router = APIRouter(prefix="/samples", tags=["samples"])


class Span(BaseModel):
    """Tokens ``[start, end)`` of a sequence, all made by ``version``; null is the bare base model."""

    version: str | None
    start: int
    end: int


class Sequence(BaseModel):
    """A sampled sequence. ``stop_reason`` is ``stop``, ``length``, or ``abort`` for one that a pause has cut."""

    stop_reason: str
    spans: list[Span]


class SampleInfo(BaseModel):
    """Report on a sample. ``min_version`` and ``max_version`` are the oldest and newest version used, by publication."""

    request_id: str
    sequences: list[Sequence]
    min_version: str | None
    max_version: str | None
    replicas: list[str]
    attempts: int
    queue_seconds: float
    decode_seconds: float


@router.get("/{request_id}")
async def describe(caller: SampleReader, services: Services, request_id: PathId) -> SampleInfo:
    """Describe how a finished sample was made. Raises ``NotFound``, also while the sample is not finished."""
    async with services.runtime.database.read() as session:
        report, versions = await report_of(session, caller.reach, request_id)
    return _info(request_id, report, versions)


def _info(request_id: str, report: SampleReport, versions: list[str]) -> SampleInfo:
    return SampleInfo(
        request_id=request_id,
        sequences=[
            Sequence(
                stop_reason=sequence.stop_reason,
                spans=[Span(version=span.version, start=span.start, end=span.end) for span in sequence.spans],
            )
            for sequence in report.sequences
        ],
        min_version=versions[0] if versions else None,
        max_version=versions[-1] if versions else None,
        replicas=report.replicas,
        attempts=report.attempts,
        queue_seconds=report.queue_seconds,
        decode_seconds=report.decode_seconds,
    )
