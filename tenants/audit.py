"""The audit log's one way in: an entry is written in the transaction of the change that it tells of.

A change that is rolled back leaves no entry, and no change is committed without its entry. ``tenants.audit_digests`` proves later
that no entry was changed or removed.
"""

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, cast

from sqlalchemy import Insert, Table, bindparam, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from contracts.secrets import mask_secrets
from store.tables import ApiKey, AuditDigest, AuditEntry, Operation, Session
from tenants.audit_actions import Action
from tenants.rights import KeyRights, Principal

_MOST_CHARACTERS = 300
_MOST_VALUES = 50
_MOST_BYTES = 4096
"""Longest ``before`` or ``after``, as JSON."""

_AT_ONCE = 100
"""Entries of one statement."""

_entries = cast(Table, AuditEntry.__table__)


def _insert() -> Insert:
    """Return the statement that writes entries.

    The day is ``of_day``, or the first one after the closed ones if that is closed: a slow clock, or a transaction at
    midnight. It is evaluated in the insert, which waits for the closing of a day (``tenants.audit_digests``).
    """
    of_day = bindparam("of_day", type_=_entries.c.day.type)
    first_open = (
        select(AuditDigest.next_day).where(AuditDigest.day >= of_day).order_by(AuditDigest.day.desc()).limit(1)
    ).scalar_subquery()
    of_session = bindparam("of_session", type_=Session.__table__.c.id.type)
    project_of = select(func.coalesce(Session.project, Session.tenant_id)).where(Session.id == of_session)
    given = (
        *("at", "tenant_id", "actor", "key_id", "role", "door", "action", "resource", "resource_id"),
        *("before", "after", "address", "trace_id", "outcome"),
    )
    values: dict[str, Any] = {name: bindparam(name, type_=_entries.c[name].type) for name in given}
    values["day"] = func.coalesce(first_open, of_day)
    values["project"] = func.coalesce(
        project_of.scalar_subquery(), bindparam("in_project", type_=_entries.c.project.type)
    )
    return insert(_entries).values(values)


_INSERT = _insert()


class Door(StrEnum):
    """Way by which an actor came in.

    - ``key``: an API key. ``token``: a token that stands for one. ``link``: a download link that was made with one.
    - ``ui``: the dashboard, in a web session that was begun with an API key.
    - ``share``: another tenant, which may use a checkpoint: published, or with a key of its tenant's as access token.
    - ``cli``: the ``weft`` command on the database. ``admin``: the operators' API.
    - ``service``: weft itself, such as its housekeeping.
    """

    KEY = "key"
    TOKEN = "token"
    LINK = "link"
    UI = "ui"
    SHARE = "share"
    CLI = "cli"
    ADMIN = "admin"
    SERVICE = "service"


class Outcome(StrEnum):
    """Outcome of what an entry tells of."""

    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Actor:
    """Party that does something.

    ``name`` is a key's first part, an operator's user and host, or a part of weft. ``address`` and ``trace_id`` are those of the
    request, None where there is none.
    """

    door: Door
    name: str
    key_id: int | None = None
    role: str | None = None
    address: str | None = None
    trace_id: str | None = None


HOUSEKEEPING = Actor(Door.SERVICE, "housekeeping")


def actor_of(principal: Principal, *, trace_id: str | None) -> Actor:
    """Return the actor that a request's principal is."""
    return Actor(
        Door(principal.via), principal.prefix, principal.key_id, principal.role, principal.address, trace_id=trace_id
    )


async def actor_of_operation(session: AsyncSession, operation: str) -> Actor:
    """Return the actor whose request has brought the operation."""
    found = await session.execute(
        select(ApiKey.id, ApiKey.prefix, ApiKey.role, Operation.trace_id)
        .select_from(Operation)
        .join(ApiKey, ApiKey.id == Operation.key_id)
        .where(Operation.id == operation)
    )
    row = found.one_or_none()
    # Operations of before keys were noted have none.
    return (
        Actor(Door.SERVICE, "trainer")
        if row is None
        else Actor(Door.KEY, row.prefix, row.id, row.role, None, row.trace_id)
    )


def session_of(lane: str) -> str:
    """Return the session of a run or a sampler, with which its id begins."""
    return lane.partition(":")[0]


async def record(
    transaction: AsyncSession,
    actor: Actor,
    action: Action,
    resource_id: str,
    *,
    tenant: TenantId | None,
    now: datetime,
    project: str | None = None,
    session_id: str | None = None,
    before: Mapping[str, object] | None = None,
    after: Mapping[str, object] | None = None,
    outcome: Outcome = Outcome.DONE,
) -> None:
    """Write an entry in ``transaction``, which makes the change.

    - ``tenant``: whose things it is about; None: the service's own.
    - ``session_id``: session whose project is the entry's, in place of ``project``.
    - ``before``, ``after``: values that have changed. They are cut to a few kilobytes, and known secrets masked.
    """
    written = _Written(resource_id, session_id, before, after)
    await _write(transaction, actor, action, [written], tenant=tenant, now=now, project=project, outcome=outcome)


async def record_many(
    transaction: AsyncSession,
    actor: Actor,
    action: Action,
    resources: Sequence[tuple[str, str | None]],
    *,
    tenant: TenantId,
    now: datetime,
) -> None:
    """Write an entry for each resource and session, in order, as ``record`` does, with few statements.

    The event loop has its turn between two of them.
    """
    for first in range(0, len(resources), _AT_ONCE):
        some = [_Written(*one) for one in resources[first : first + _AT_ONCE]]
        await _write(transaction, actor, action, some, tenant=tenant, now=now)
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class _Written:
    """Part of an entry that differs from the other entries of its statement."""

    resource_id: str
    session_id: str | None
    before: Mapping[str, object] | None = None
    after: Mapping[str, object] | None = None


async def _write(
    transaction: AsyncSession,
    actor: Actor,
    action: Action,
    entries: Sequence[_Written],
    *,
    tenant: TenantId | None,
    now: datetime,
    project: str | None = None,
    outcome: Outcome = Outcome.DONE,
) -> None:
    common = {
        "at": now,
        "of_day": now.astimezone(UTC).date(),
        "tenant_id": tenant,
        "actor": actor.name[:200],
        "key_id": actor.key_id,
        "role": actor.role,
        "door": actor.door,
        "action": action,
        "resource": action.resource,
        "in_project": project,
        "address": None if actor.address is None else actor.address[:64],
        "trace_id": actor.trace_id,
        "outcome": outcome,
    }
    rows = [
        {
            **common,
            "resource_id": mask_secrets(entry.resource_id)[:500],
            "of_session": entry.session_id,
            "before": bounded(entry.before),
            "after": bounded(entry.after),
        }
        for entry in entries
    ]
    await transaction.execute(_INSERT, rows)


def bounded(values: Mapping[str, object] | None) -> dict[str, Any] | None:
    """Return ``values`` as JSON of a few kilobytes at most, without secrets that are known as such."""
    if values is None:
        return None
    kept: dict[str, Any] = {}
    room = _MOST_BYTES
    for name, value in list(values.items())[:_MOST_VALUES]:
        plain = _plain(value)
        room -= len(json.dumps([name, plain]))
        if room < 0:
            return {**kept, "cut": True}
        kept[name] = plain
    return kept


def rights_told(rights: KeyRights, note: str) -> dict[str, object]:
    """Return a key's rights as an entry tells them; bounds that are none are left out."""
    told: dict[str, object] = {
        "role": rights.role,
        "scopes": rights.scopes,
        "projects": rights.projects,
        "expires_at": rights.expires_at,
        "base_models": rights.base_models,
        "max_rank": rights.max_rank,
        "networks": rights.networks,
        "limits": rights.limits,
        "note": note or None,
    }
    return {name: value for name, value in told.items() if value is not None}


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(name)[:_MOST_CHARACTERS]: _plain(one) for name, one in list(value.items())[:_MOST_VALUES]}
    if isinstance(value, Collection) and not isinstance(value, str):
        ordered = sorted(value) if isinstance(value, set | frozenset) else list(value)
        return [_plain(one) for one in ordered[:_MOST_VALUES]]
    return mask_secrets(str(value))[:_MOST_CHARACTERS]
