"""Operators' directives as one trainer sees them: runs to give up or to page out, and tenants whose work waits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RunId, TenantId
from store.tables import Run, WorkerProcess
from tenants.placements import MOST_RUNS
from tenants.run_directives import RunDirective, directives_for
from tenants.suspensions import suspensions


@dataclass(frozen=True, slots=True)
class Leaving:
    """A run that is to go to another trainer: to ``target``, or to any. ``reason`` is the operator's."""

    target: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Directives:
    """Directives that stand for one trainer."""

    is_drained: bool = False
    """The trainer takes no runs."""
    leaving: Mapping[RunId, Leaving] = field(default_factory=lambda: MappingProxyType({}))
    evicted: frozenset[RunId] = frozenset()
    """Runs whose adapters are to go to disk. They stay the trainer's."""
    suspended: frozenset[TenantId] = frozenset()
    """Tenants whose accepted work waits."""


async def read_directives(session: AsyncSession, trainer: str) -> Directives:
    """Return the directives for ``trainer``; of a drained trainer's runs at most ``MOST_RUNS`` leave at a time."""
    standing = await directives_for(session, trainer)
    leaving = {one.run: Leaving(one.target, one.reason) for one in standing if one.directive is RunDirective.MOVE}
    drained = select(WorkerProcess.drained_at).where(WorkerProcess.id == trainer)
    is_drained = await session.scalar(drained) is not None
    if is_drained:
        own = select(Run.id).where(Run.trainer_id == trainer).order_by(Run.last_request_at).limit(MOST_RUNS)
        leaving = {RunId(run): Leaving() for run in await session.scalars(own)} | leaving
    return Directives(
        is_drained=is_drained,
        leaving=leaving,
        evicted=frozenset(one.run for one in standing if one.directive is RunDirective.EVICT),
        suspended=frozenset(await suspensions(session)),
    )
