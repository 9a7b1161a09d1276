"""Endpoint that reports on a finished sample: the weights that made each token, the replicas, and the time it took."""

from collections.abc import Mapping
from datetime import datetime

from fastapi import APIRouter
from pydantic import BaseModel

from api.authentication import SampleReader
from api.json_body import PathId
from api.services import Services
from contracts.sample_report import SampleReport
from tenants.sample_reports import report_of
from tenants.version_facts import VersionFacts, version_facts

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


class UsedVersion(BaseModel):
    """A version of the caller's run ``run``: its path, null without a name, and the optimizer step that it was saved after."""

    version: str
    run: str
    path: str | None
    step: int
    created_at: datetime


class SampleInfo(BaseModel):
    """Report on a sample. ``min_version`` and ``max_version`` are the oldest and newest version used, by publication.

    ``scored_version`` has scored the prompt; it is null for the bare base and where nothing was scored.

    ``versions`` describes those that the caller still has.
    """

    request_id: str
    sequences: list[Sequence]
    min_version: str | None
    max_version: str | None
    replicas: list[str]
    attempts: int
    queue_seconds: float
    decode_seconds: float
    scored_version: str | None
    versions: list[UsedVersion]


@router.get("/{request_id}")
async def describe(caller: SampleReader, services: Services, request_id: PathId) -> SampleInfo:
    """Describe how a finished sample was made. Raises ``NotFound``, also while the sample is not finished."""
    async with services.runtime.database.read() as session:
        report, versions = await report_of(session, caller.reach, request_id)
        facts = await version_facts(session, caller.reach, versions)
    return _info(request_id, report, versions, facts)


def used_version(facts: VersionFacts) -> UsedVersion:
    """Return the answer's form of the facts."""
    return UsedVersion(version=facts.id, run=facts.run, path=facts.path, step=facts.step, created_at=facts.created_at)


def _info(request_id: str, report: SampleReport, versions: list[str], facts: Mapping[str, VersionFacts]) -> SampleInfo:
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
        scored_version=report.scored_version,
        versions=[used_version(facts[version]) for version in versions if version in facts],
    )
