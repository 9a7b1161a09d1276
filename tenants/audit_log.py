"""Reads of the audit log: pages of entries, the newest first, and the view that a tenant has of them."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, literal, not_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.tables import AuditEntry
from store.tables.base import UtcDateTime
from tenants.audit import Door
from tenants.list_places import Place, wrong_cursor
from tenants.reach import Owner, Reach, tenant_of
from tenants.rights import Role

_OPERATORS = (Door.CLI, Door.ADMIN)
"""Doors that operators alone come by. To their pages they come by ``ui``, as tenants' own people do."""
OPERATOR = "operator"
"""Name by which tenants are told of an operator."""
ANOTHER_TENANT = "another tenant"
"""Name by which tenants are told of one that uses what they have published."""
_IS_STRANGER = and_(AuditEntry.door == Door.SHARE, AuditEntry.key_id.is_(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Choice of entries; None takes any. ``key`` is a key's first part.

    - ``owner``: tenant who reads, or its projects; None: operators, who read every tenant's and the service's own.
    - ``tenant``: tenant that the entries are about, for operators.
    """

    owner: Owner | None
    tenant: TenantId | None = None
    actions: Collection[str] | None = None
    resources: Collection[str] | None = None
    key: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries, and the cursor of the next page; None on the last one."""

    entries: list[AuditEntry]
    next: str | None


async def read_entries(
    session: AsyncSession, which: AuditFilter, *, most: int, cursor: str | None = None, oldest_first: bool = False
) -> AuditPage:
    """Return a page of entries, the newest first unless ``oldest_first``. Raises ``InvalidRequest`` for a wrong cursor."""
    place = (AuditEntry.at, AuditEntry.id)
    conditions = _conditions(which)
    if cursor is not None:
        at, id = _parsed(cursor)
        last = tuple_(literal(at, UtcDateTime()), literal(id))
        conditions.append(tuple_(*place) > last if oldest_first else tuple_(*place) < last)
    order = [column.asc() if oldest_first else column.desc() for column in place]
    rows = list(await session.scalars(select(AuditEntry).where(*conditions).order_by(*order).limit(most + 1)))
    if len(rows) <= most:
        return AuditPage(rows, None)
    return AuditPage(rows[:most], Place(rows[most - 1].at, str(rows[most - 1].id)).cursor)


def told_actor(entry: AuditEntry) -> tuple[str, int | None, str | None]:
    """Return an entry's actor, key and address as tenants are told them.

    An operator's are the service's own. Of another tenant they are told nothing but which of their own keys it has used.
    """
    if entry.door in _OPERATORS or entry.role == Role.OPERATOR:
        return OPERATOR, None, None
    if entry.door == Door.SHARE:
        return ANOTHER_TENANT if entry.key_id is None else entry.actor, entry.key_id, None
    return entry.actor, entry.key_id, entry.address


def _conditions(which: AuditFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if which.owner is not None:
        conditions.append(AuditEntry.tenant_id == tenant_of(which.owner))
    if which.tenant is not None:
        conditions.append(AuditEntry.tenant_id == which.tenant)
    if isinstance(which.owner, Reach):
        conditions.append(AuditEntry.project.in_(sorted(which.owner.projects)))
    if which.actions is not None:
        conditions.append(AuditEntry.action.in_(sorted(which.actions)))
    if which.resources is not None:
        conditions.append(AuditEntry.resource.in_(sorted(which.resources)))
    if which.key is not None:
        conditions.append(AuditEntry.actor == which.key)
        if which.owner is not None:
            # Tenants are not told names of operators and of other tenants, so they find none by them.
            conditions += [AuditEntry.door.not_in(_OPERATORS), AuditEntry.role.is_distinct_from(Role.OPERATOR)]
            conditions.append(not_(_IS_STRANGER))
    if which.since is not None:
        conditions.append(AuditEntry.at >= which.since)
    if which.until is not None:
        conditions.append(AuditEntry.at < which.until)
    return conditions


def _parsed(cursor: str) -> tuple[datetime, int]:
    place = Place.parse(cursor)
    if not (place.id.isascii() and place.id.isdigit() and len(place.id) <= 18):
        raise wrong_cursor()
    return place.at, int(place.id)
