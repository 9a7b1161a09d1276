"""Reach: the rows of a tenant that a request may touch, all of them or those of some projects.

A row is reached by its session, which is in one project: its own, or the tenant's default project.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from contracts.ids import TenantId
from store.tables import Session


@dataclass(frozen=True, slots=True)
class Reach:
    """Rows of a tenant that are in one of the ``projects``."""

    tenant: TenantId
    projects: frozenset[str]


Owner: TypeAlias = TenantId | Reach
"""Owner of the rows that are looked for: a whole tenant, or some of its projects."""


def tenant_of(owner: Owner) -> TenantId:
    """Return the tenant."""
    return owner.tenant if isinstance(owner, Reach) else owner


def default_project(tenant: TenantId) -> str:
    """Return the id of the project that a tenant's sessions are in if they name none."""
    return tenant


def includes(owner: Owner, project: str | None) -> bool:
    """Return whether the owner reaches a session with that ``project`` in its row."""
    return not isinstance(owner, Reach) or (project or default_project(owner.tenant)) in owner.projects


def reached_sessions(owner: Owner) -> list[ColumnElement[bool]]:
    """Return the conditions under which rows of ``sessions`` are the owner's."""
    own: list[ColumnElement[bool]] = [Session.tenant_id == tenant_of(owner)]
    if isinstance(owner, Reach):
        own.append(func.coalesce(Session.project, default_project(owner.tenant)).in_(sorted(owner.projects)))
    return own


async def check_lane(session: AsyncSession, owner: Owner, lane: str, missing: NotFound) -> None:
    """Raise ``missing`` unless the owner reaches the session of a run or a sampler, which the tenant owns.

    Their ids begin with the session's. A whole tenant costs no statement.
    """
    if isinstance(owner, Reach):
        of_lane = select(Session.id).where(Session.id == lane.partition(":")[0], *reached_sessions(owner))
        if await session.scalar(of_lane) is None:
            raise missing


def within(owner: Owner, session_id: Any) -> list[ColumnElement[bool]]:
    """Return the conditions under which rows of a tenant, with the column ``session_id``, are in the owner's projects."""
    if not isinstance(owner, Reach):
        return []
    return [session_id.in_(select(Session.id).where(*reached_sessions(owner)))]
