"""Marks of a run's curve: what happened to the run beside its steps, from rows that are kept anyway.

Checkpoints and published versions, the run's history with its trainers, pauses of its samples, and its session's begin and end.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.paths import Segment
from store.batcher import few_lengths
from store.tables import AuditEntry, Checkpoint, Run, RunPoint, Session
from store.tables.audit import IS_OF_SAMPLING
from tenants.audit_actions import Action
from tenants.run_history import PastEvent, RunEventKind, run_history

MOST_MARKS = 300
"""Marks of one answer, the newest."""
_READ_WHOLE = 2000
"""Steps of a run whose times are read all at once."""


class MarkKind(StrEnum):
    """Kind of a mark.

    - ``checkpoint``: weights with a name were saved. ``publication``: a version for samplers was.
    - ``reloaded``: live samplers were pointed at a version.
    - ``claimed``, ``released``, ``trainer_lost``, ``moved``, ``restored``, ``replayed``, ``evicted``: the run's history.
    - ``paused``, ``resumed``: samples of the run's adapter.
    - ``session_opened``, ``session_ended``: the client's session.
    """

    CHECKPOINT = "checkpoint"
    PUBLICATION = "publication"
    RELOADED = "reloaded"
    CLAIMED = "claimed"
    RELEASED = "released"
    TRAINER_LOST = "trainer_lost"
    MOVED = "moved"
    RESTORED = "restored"
    REPLAYED = "replayed"
    EVICTED = "evicted"
    PAUSED = "paused"
    RESUMED = "resumed"
    SESSION_OPENED = "session_opened"
    SESSION_ENDED = "session_ended"


@dataclass(frozen=True, slots=True)
class RunMark:
    """Something that happened to a run. ``id`` is the mark's for ever. ``name``: of a checkpoint."""

    id: str
    kind: MarkKind
    at: datetime
    text: str
    name: str | None = None


_OF_HISTORY = {
    RunEventKind.CLAIMED: (MarkKind.CLAIMED, "A trainer took the run"),
    RunEventKind.RELEASED: (MarkKind.RELEASED, "The trainer gave the run back"),
    RunEventKind.LOST: (MarkKind.TRAINER_LOST, "The trainer was lost"),
    RunEventKind.MOVED: (MarkKind.MOVED, "The run moved to another trainer"),
    RunEventKind.RESTORED: (MarkKind.RESTORED, "The adapter was rebuilt"),
    RunEventKind.REPLAYED: (MarkKind.REPLAYED, "The adapter was rebuilt, and operations replayed"),
    RunEventKind.EVICTED: (MarkKind.EVICTED, "The adapter was paged out"),
}
_TELLS_DETAIL = (RunEventKind.RESTORED, RunEventKind.REPLAYED)
"""Events whose detail is for tenants, too; that of others may name trainers, or an operator's reason."""


async def read_marks(session: AsyncSession, run: Run, now: datetime) -> list[RunMark]:
    """Return the newest marks of the run, in order of time."""
    found = [*await _of_session(session, run.session_id), *await _of_checkpoints(session, run.id)]
    found += [_of_event(event) for event in await run_history(session, run.id)]
    found += await _of_sampling(session, run, now)
    return sorted(found, key=lambda mark: (mark.at, mark.id))[-MOST_MARKS:]


async def steps_at(session: AsyncSession, run: Run, times: Sequence[datetime]) -> list[int]:
    """Return for each time the run's last optimizer step that had ended by then, 0 before the first."""
    if run.optimizer_steps <= _READ_WHOLE:
        ended = (RunPoint.run_id == run.id, RunPoint.at.is_not(None))
        rows = (await session.execute(select(RunPoint.step, RunPoint.at).where(*ended).order_by(RunPoint.step))).all()
        ends, steps = [row.at for row in rows], [0, *(row.step for row in rows)]
        return [steps[bisect_right(ends, time)] for time in times]
    return await _searched(session, run, times)


async def _searched(session: AsyncSession, run: Run, times: Sequence[datetime]) -> list[int]:
    """Search all times at once by halves: a query for each half reads one point for each time."""
    low, high = [0] * len(times), [run.optimizer_steps] * len(times)
    while middles := {(a + b + 1) // 2 for a, b in zip(low, high, strict=True) if a < b}:
        wanted = (RunPoint.run_id == run.id, RunPoint.step.in_(few_lengths(sorted(middles))))
        ends = {row.step: row.at for row in await session.execute(select(RunPoint.step, RunPoint.at).where(*wanted))}
        for place, time in enumerate(times):
            if low[place] < high[place]:
                middle = (low[place] + high[place] + 1) // 2
                # A step without a point was computed by an older version, before all that have one.
                end = ends.get(middle)
                if end is None or end <= time:
                    low[place] = middle
                else:
                    high[place] = middle - 1
    return low


async def _of_session(session: AsyncSession, session_id: str) -> Iterable[RunMark]:
    row = await session.get(Session, session_id)
    if row is None:
        return []
    marks = [RunMark("session-0", MarkKind.SESSION_OPENED, row.created_at, "The session was opened")]
    if row.ended_at is not None:
        told = f"The session ended ({row.end_reason})"
        marks.append(RunMark("session-1", MarkKind.SESSION_ENDED, row.ended_at, told))
    return marks


async def _of_checkpoints(session: AsyncSession, run: str) -> list[RunMark]:
    newest = select(Checkpoint.id, Checkpoint.segment, Checkpoint.name, Checkpoint.listed, Checkpoint.created_at)
    rows = await session.execute(
        newest.where(Checkpoint.run_id == run).order_by(Checkpoint.created_at.desc()).limit(MOST_MARKS)
    )
    marks = []
    for row in rows:
        name = row.name if row.listed else None
        if row.segment == Segment.SAMPLER_WEIGHTS:
            kind, told = MarkKind.PUBLICATION, "Published a version" if name is None else f"Published {name}"
        else:
            kind, told = MarkKind.CHECKPOINT, f"Saved {row.name}"
        marks.append(RunMark(f"checkpoint-{row.id}", kind, row.created_at, told, name))
    return marks


def _of_event(event: PastEvent) -> RunMark:
    kind, told = _OF_HISTORY[event.kind]
    if event.detail and event.kind in _TELLS_DETAIL:
        told = f"{told}: {event.detail}"
    return RunMark(f"event-{event.id}", kind, event.at, told)


async def _of_sampling(session: AsyncSession, run: Run, now: datetime) -> list[RunMark]:
    """Return pauses, resumes and reloads, the end of a pause that ended by its time included."""
    rows = await session.scalars(
        select(AuditEntry)
        .where(AuditEntry.resource_id == run.id, AuditEntry.tenant_id == run.tenant_id, IS_OF_SAMPLING)
        .order_by(AuditEntry.id.desc())
        .limit(MOST_MARKS)
    )
    marks: list[RunMark] = []
    ends: tuple[str, datetime] | None = None
    for row in reversed(rows.all()):
        told: dict[str, Any] = row.after or {}
        id = f"audit-{row.id}"
        if row.action == Action.RUN_RELOAD:
            name = told["path"].rsplit("/", 1)[-1] if told.get("path") else "the newest version"
            marks.append(RunMark(id, MarkKind.RELOADED, row.at, f"Live samplers were pointed at {name}"))
            continue
        marks += _expired(ends, row.at)
        ends = None
        if row.action == Action.GATE_PAUSE:
            reason = f": {told['reason']}" if told.get("reason") else ""
            marks.append(RunMark(id, MarkKind.PAUSED, row.at, f"Sampling was paused{reason}"))
            if told.get("expires_at"):
                ends = (id, datetime.fromisoformat(told["expires_at"]))
        else:
            marks.append(RunMark(id, MarkKind.RESUMED, row.at, "Sampling was resumed"))
    return [*marks, *_expired(ends, now)]


def _expired(pause: tuple[str, datetime] | None, until: datetime) -> list[RunMark]:
    if pause is None or pause[1] > until:
        return []
    return [RunMark(f"{pause[0]}-end", MarkKind.RESUMED, pause[1], "The pause ended by its time")]
