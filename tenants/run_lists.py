"""Lists of a tenant's runs: pages by key, latest first, with filters, and the newest losses of the runs of a page."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, String, and_, case, column, func, literal, literal_column, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql.selectable import TableValuedAlias

from contracts.errors import NotFound
from store.batcher import few_lengths
from store.tables import Run, RunPoint, RunState, Session
from store.tables.base import UtcDateTime
from tenants.list_places import Place
from tenants.reach import Owner, default_project, reached_sessions, tenant_of

MOST_RUNS = 200
"""Runs of a page at most."""
MOST_RECENT = 100
"""Newest points of each run at most."""
SEARCHED = 20_000
"""Runs of a page in which text or an entry of the metadata is searched at most."""
PIECE = 250
"""Runs searched by one statement. SQLite's statements run on the event loop, and no index has what metadata says."""


class ListedState(StrEnum):
    """State of a run as its tenant sees it.

    - ``creating``, ``ready``, ``unloaded``, ``failed``: the adapter's own state.
    - ``ended``: the adapter was not unloaded, but its session has ended, so it takes no more work.
    """

    CREATING = "creating"
    READY = "ready"
    ENDED = "ended"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Choice of runs; None takes any.

    - ``projects``: ids of projects. ``text``: part of the id, of the base model or of the metadata.
    - ``metadata``: a name and its value, both whole.
    """

    owner: Owner
    projects: frozenset[str] | None = None
    base_model: str | None = None
    state: ListedState | None = None
    text: str | None = None
    metadata: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run with what its session tells. ``project`` is an id."""

    run: Run
    state: ListedState
    project: str
    sdk_version: str
    ended_at: datetime | None
    end_reason: str | None


@dataclass(frozen=True, slots=True)
class RunPage:
    """Runs, latest first, and the cursor of the next page; None on the last one."""

    runs: list[ListedRun]
    next: str | None


_LATEST = (Run.created_at.desc(), Run.id.desc())
_key = tuple_(Run.created_at, Run.id)
_ROW = select(Run, Session.project, Session.sdk_version, Session.ended_at, Session.end_reason).join(
    Session, Session.id == Run.session_id
)


async def page_of_runs(session: AsyncSession, which: RunFilter, *, most: int, cursor: str | None = None) -> RunPage:
    """Return a page of runs, the latest first. Raises ``InvalidRequest`` for a wrong cursor.

    A page of a search may be shorter than ``most`` and still have a next one.
    """
    place = None if cursor is None else Place.parse(cursor)
    most = min(most, MOST_RUNS)
    if which.text or which.metadata is not None:
        rows, end = await _searched(session, which, place, most + 1)
    else:
        rows, end = await _rows(session, [*_conditions(which), *_before(place)], most + 1), None
    if len(rows) > most:
        end = Place.of(rows[most - 1][0])
    return RunPage([_listed(row, which.owner) for row in rows[:most]], None if end is None else end.cursor)


async def _rows(session: AsyncSession, conditions: Sequence[ColumnElement[bool]], most: int) -> list[Any]:
    query = _ROW.where(*conditions).order_by(*_LATEST).limit(most)
    return list((await session.execute(query)).all())


async def _searched(
    session: AsyncSession, which: RunFilter, place: Place | None, most: int
) -> tuple[list[Any], Place | None]:
    """Return the latest runs before the place that the search finds, and where it stopped; None at the first run."""
    conditions, sought = _conditions(which), _sought(which, session.get_bind().dialect.name)
    keys = select(Run.created_at, Run.id).join(Session, Session.id == Run.session_id).order_by(*_LATEST)
    rows: list[Any] = []
    for _ in range(max(1, SEARCHED // PIECE)):
        piece = [*conditions, *_before(place)]
        last = (await session.execute(keys.where(*piece).offset(PIECE - 1).limit(1))).one_or_none()
        place = None if last is None else Place(last.created_at, last.id)
        if place is not None:
            piece.append(_key >= _literal(place))
        rows += await _rows(session, [*piece, *sought], most - len(rows))
        if place is None or len(rows) == most:
            break
        # Other requests have their turn: a statement of SQLite gives none.
        await asyncio.sleep(0)
    return rows, place


async def listed_run(session: AsyncSession, owner: Owner, run_id: str) -> ListedRun:
    """Return the owner's run. Raises ``NotFound``."""
    row = (await session.execute(_ROW.where(Run.id == run_id, *_conditions(RunFilter(owner=owner))))).one_or_none()
    if row is None:
        raise NotFound(f"no model {run_id[:150]!r}")
    return _listed(row, owner)


async def listed_runs(session: AsyncSession, owner: Owner, run_ids: Sequence[str]) -> list[ListedRun]:
    """Return those of the runs that are the owner's, at most ``MOST_RUNS`` of them; the others are left out."""
    wanted = few_lengths(list(run_ids[:MOST_RUNS]))
    rows = await session.execute(_ROW.where(Run.id.in_(wanted), *_conditions(RunFilter(owner=owner))))
    return [_listed(row, owner) for row in rows]


async def recent_losses(session: AsyncSession, runs: Sequence[Run], *, most: int) -> dict[str, list[float | None]]:
    """Return the mean losses of the last ``most`` steps of each run, in order, in one query."""
    if not runs or not most:
        return {}
    ids = few_lengths(sorted(run.id for run in runs))
    newest = RunPoint.step > Run.optimizer_steps - min(most, MOST_RECENT)
    rows = await session.execute(
        select(RunPoint.run_id, RunPoint.loss_sum, RunPoint.loss_weight)
        .join(Run, and_(Run.id == RunPoint.run_id, newest))
        .where(RunPoint.run_id.in_(ids), RunPoint.at.is_not(None))
        .order_by(RunPoint.run_id, RunPoint.step)
    )
    found: dict[str, list[float | None]] = {}
    for run, total, weight in rows:
        found.setdefault(run, []).append(None if total is None or not weight else total / weight)
    return found


def _conditions(which: RunFilter) -> list[ColumnElement[bool]]:
    tenant = tenant_of(which.owner)
    conditions = [Run.tenant_id == tenant, *reached_sessions(which.owner)]
    if which.projects is not None:
        conditions.append(func.coalesce(Session.project, default_project(tenant)).in_(sorted(which.projects)))
    if which.base_model is not None:
        conditions.append(Run.base_model == which.base_model)
    if which.state is not None:
        conditions.append(_is_in(which.state))
    return conditions


def _before(place: Place | None) -> list[ColumnElement[bool]]:
    return [] if place is None else [_key < _literal(place)]


def _literal(place: Place) -> ColumnElement[Any]:
    return tuple_(literal(place.at, UtcDateTime()), literal(place.id))


def _is_in(state: ListedState) -> ColumnElement[bool]:
    if state is ListedState.ENDED:
        return and_(Run.state.in_([RunState.CREATING, RunState.READY]), Session.ended_at.is_not(None))
    its_own = Run.state == RunState(state.value)
    if state in (ListedState.CREATING, ListedState.READY):
        return and_(its_own, Session.ended_at.is_(None))
    return its_own


def _sought(which: RunFilter, dialect: str) -> list[ColumnElement[bool]]:
    """Return the conditions of the filter's text and entry. Metadata is read entry by entry, not as JSON's own text."""
    entries = _entries(dialect)
    any_entry = select(1).select_from(entries)
    found: list[ColumnElement[bool]] = []
    if which.text:
        columns = (entries.c.key, entries.c.value)
        told = any_entry.where(or_(*(one.icontains(which.text, autoescape=True) for one in columns)))
        names = (one.icontains(which.text, autoescape=True) for one in (Run.id, Run.base_model))
        found.append(or_(*names, told.exists()))
    if which.metadata is not None:
        name, value = which.metadata
        found.append(any_entry.where(entries.c.key == name, entries.c.value == value).exists())
    return found


def _entries(dialect: str) -> TableValuedAlias:
    """Return the names and values of a run's metadata as rows; a run without metadata has none."""
    if dialect == "sqlite":
        read = func.json_each(Run.user_metadata)
    else:
        # PostgreSQL refuses to take JSON's null apart.
        is_object = func.json_typeof(Run.user_metadata) == "object"
        read = func.json_each_text(case((is_object, Run.user_metadata), else_=literal_column("'{}'::json")))
    return read.table_valued(column("key", String), column("value", String))


def _listed(row: Any, owner: Owner) -> ListedRun:
    run: Run = row[0]
    is_over = row.ended_at is not None and run.state in (RunState.CREATING, RunState.READY)
    return ListedRun(
        run=run,
        state=ListedState.ENDED if is_over else ListedState(run.state),
        project=row.project or default_project(tenant_of(owner)),
        sdk_version=row.sdk_version,
        ended_at=row.ended_at,
        end_reason=row.end_reason,
    )
