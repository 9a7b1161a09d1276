"""Uses of all projects of a tenant at once: one statement for each kind of row, however many projects there are.

Each limit is counted as ``tenants.project_limits`` counts it where it is enforced, for one project.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Select, bindparam, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING
from store.tables import Checkpoint, Operation, Run, Sampler, Session
from tenants.limit_use import sum_of
from tenants.project_limits import COUNTED, ProjectUse, limited_projects
from tenants.reach import Owner, tenant_of

_TENANT: BindParameter[str] = bindparam("tenant", unique=False)
_NUMBER: ColumnElement[int] = func.count()
_RUN_OF_CHECKPOINT = Run.id == Checkpoint.run_id
_RUN_OF_OPERATION = Run.id == Operation.lane
_SAMPLER_OF_OPERATION = Sampler.id == Operation.lane


def _by_project(rows: Any, *where: ColumnElement[bool], **counted: ColumnElement[int]) -> Select[Any]:
    """Return the query of the tenant's ``rows``, joined to their sessions where they are others, by project."""
    columns: list[Any] = [Session.project, *(column.label(name) for name, column in counted.items())]
    query = select(*columns).select_from(rows)
    return query.where(Session.project.is_not(None), *where).group_by(Session.project)


def _with_session(of: type[Run] | type[Sampler], rows: Any) -> Any:
    return rows.join(Session, Session.id == of.session_id)


_operations, _checkpoints = Operation.__table__, Checkpoint.__table__
_PENDING = (Operation.tenant_id == _TENANT, IS_PENDING)
_QUERIES = (
    _by_project(Session, Session.tenant_id == _TENANT, Session.ended_at.is_(None), sessions=_NUMBER),
    _by_project(
        _with_session(Run, Run.__table__),
        Run.tenant_id == _TENANT,
        # A literal, as in the partial index.
        Run.state == literal_column("'ready'"),
        Session.ended_at.is_(None),
        open_runs=_NUMBER,
    ),
    _by_project(
        _with_session(Run, _operations.join(Run.__table__, _RUN_OF_OPERATION)),
        *_PENDING,
        IS_TRAINING,
        pending_operations=_NUMBER,
        pending_bytes=sum_of(Operation.payload_bytes),
    ),
    _by_project(
        _with_session(Sampler, _operations.join(Sampler.__table__, _SAMPLER_OF_OPERATION)),
        *_PENDING,
        IS_SAMPLE,
        pending_samples=_NUMBER,
    ),
    _by_project(
        _with_session(Run, _checkpoints.join(Run.__table__, _RUN_OF_CHECKPOINT)),
        Checkpoint.tenant_id == _TENANT,
        checkpoints=_NUMBER,
        stored_bytes=sum_of(Checkpoint.size_bytes),
    ),
    _by_project(
        _with_session(Run, Run.__table__),
        Run.tenant_id == _TENANT,
        Run.snapshot_dir.is_not(None),
        stored_bytes=sum_of(Run.snapshot_bytes),
    ),
)
"""A use that two queries count is the sum of both."""


async def uses_of_tenant(session: AsyncSession, owner: Owner) -> list[ProjectUse]:
    """Return each project with limits of its own that the owner reaches, with all its use."""
    found = await limited_projects(session, owner)
    wanted = {name for one in found for name in one.limits if name in COUNTED}
    counts: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for query in _QUERIES:
        if wanted.isdisjoint(query.selected_columns.keys()):
            continue
        for row in await session.execute(query, {"tenant": tenant_of(owner)}):
            for name, count in row._mapping.items():
                if name in wanted:
                    counts[row.project][name] += count
    return [replace(one, used={name: counts[one.id][name] for name in COUNTED if name in one.limits}) for one in found]
