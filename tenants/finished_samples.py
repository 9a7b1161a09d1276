"""Lists of a tenant's finished samples with their reports, newest first, as long as their results are kept."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, literal, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from contracts.ids import RequestId
from contracts.sample_report import ReportSummary, decode_report
from store.tables import Operation, Sampler
from store.tables import SampleReport as Report
from store.tables.base import UtcDateTime
from tenants.reach import Owner, tenant_of, within

SEARCHED = 5000
"""Operations that ended last, among which one page looks for samples: no index has those of a tenant alone."""

_AT_ONCE = 20
"""Samples that one statement reads: the reports of a thousand sequences are some megabytes."""

_SEARCHED: tuple[Any, ...] = (Operation.position, Operation.id, Operation.kind, Operation.lane)
_DESCRIBED: tuple[Any, ...] = (Operation, Sampler.live_run_id, Sampler.model_path, Report.body)


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """A sample that ended. ``report`` is None for one that failed; ``run`` for one of a bare base or of a pinned version."""

    id: RequestId
    sampler: str
    run: str | None
    path: str | None
    base_model: str
    state: str
    created_at: datetime
    finished_at: datetime
    prompt_tokens: int
    sampled_tokens: int
    error_code: str | None
    error_message: str | None
    report: ReportSummary | None


@dataclass(frozen=True, slots=True)
class SamplePage:
    """Samples, newest first; ``next`` is the operation after which the next page begins, None on the last one."""

    samples: list[FinishedSample]
    next: str | None


async def list_samples(session: AsyncSession, owner: Owner, *, most: int, after: str | None = None) -> SamplePage:
    """Return the owner's samples that ended last, before ``after`` if it is given. Raises ``NotFound`` for a wrong one.

    A page may be shorter than ``most`` and still have a next one.
    """
    own = [Operation.tenant_id == tenant_of(owner), Operation.finished_at.is_not(None), Operation.pruned_at.is_(None)]
    ended = select(*_SEARCHED)
    if after is not None:
        own.append(await _before(session, owner, after))
    newest = ended.where(*own).order_by(Operation.finished_at.desc(), Operation.position.desc()).limit(SEARCHED)
    searched = (await session.execute(newest)).all()
    reached = await _reached(session, owner, [row for row in searched if row.kind == "sample"])
    chosen = [row for row in searched if row.kind == "sample" and row.lane in reached][: most + 1]
    found = await _described(session, [row.position for row in chosen[:most]])
    if len(chosen) > most:
        return SamplePage(found, chosen[most - 1].id)
    return SamplePage(found, searched[-1].id if len(searched) == SEARCHED else None)


async def _before(session: AsyncSession, owner: Owner, after: str) -> ColumnElement[bool]:
    """Return the condition of operations that ended before ``after``. Raises ``NotFound``."""
    of_tenant = (Operation.id == after, Operation.tenant_id == tenant_of(owner))
    found = select(Operation.finished_at, Operation.position).where(*of_tenant)
    last = (await session.execute(found)).one_or_none()
    if last is None or last.finished_at is None:
        raise NotFound(f"after: no finished sample {after[:100]!r}; begin again without it")
    place = tuple_(literal(last.finished_at, UtcDateTime()), literal(last.position))
    return tuple_(Operation.finished_at, Operation.position) < place


async def _reached(session: AsyncSession, owner: Owner, rows: Sequence[Row[Any]]) -> set[str]:
    """Return the samplers of the rows that are in the owner's projects."""
    lanes = {row.lane for row in rows}
    conditions = within(owner, Sampler.session_id)
    if not conditions or not lanes:
        return lanes
    return set(await session.scalars(select(Sampler.id).where(Sampler.id.in_(lanes), *conditions)))


async def _described(session: AsyncSession, positions: Sequence[int]) -> list[FinishedSample]:
    samples: list[FinishedSample] = []
    for begin in range(0, len(positions), _AT_ONCE):
        query = (
            select(*_DESCRIBED)
            .outerjoin(Sampler, Sampler.id == Operation.lane)
            .outerjoin(Report, Report.operation_id == Operation.id)
            .where(Operation.position.in_(positions[begin : begin + _AT_ONCE]))
            .order_by(Operation.finished_at.desc(), Operation.position.desc())
        )
        for row in await session.execute(query):
            samples.append(_sample(row))
            # A report of a thousand sequences takes milliseconds to decode.
            await asyncio.sleep(0)
    return samples


def _sample(row: Row[Any]) -> FinishedSample:
    found: Operation = row[0]
    return FinishedSample(
        id=RequestId(found.id),
        sampler=found.lane,
        run=row.live_run_id,
        path=row.model_path,
        base_model=found.base_model,
        state=found.state,
        created_at=found.created_at,
        finished_at=found.finished_at or found.created_at,
        prompt_tokens=found.tokens - found.sampled_tokens,
        sampled_tokens=found.sampled_tokens,
        error_code=found.error_code,
        error_message=found.error_message,
        report=None if row.body is None else ReportSummary.of(decode_report(row.body)),
    )
