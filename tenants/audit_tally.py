"""Entries of the audit log about what anybody can repeat at will: refusals, and reads of what is sensitive.

Each process counts them, and writes one entry a minute for each key and kind: a flood of requests makes bounded rows, and every
request is in a count. What was counted since the last write is lost with a process that is killed.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import WeftError
from contracts.ids import TenantId
from store.batcher import few_lengths
from store.clock import Clock
from store.database import Database
from store.repeat import repeat
from store.tables import ApiKey, OperatorKey
from tenants.audit import Actor, Door, Outcome, record
from tenants.audit_actions import Action

WRITE_SECONDS = 60.0
"""Seconds between two writes."""
_MOST_KINDS = 100
"""Kinds that a minute's entries of one tenant tell apart; what is beyond counts together."""
_MOST_STRANGERS = 10_000
"""Kinds of keys not known yet that a minute tells apart until it is written: a flood of made-up keys hides no real one."""
_AT_ONCE = 500
"""Keys that one query looks for."""
OTHER_KEYS = "other keys"
"""Actor of a tenant's requests beyond those."""
UNKNOWN_KEY = "unknown keys"
"""Actor of requests with keys of no tenant: their texts may be secrets of other services."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """One request that is counted. ``resource_id`` is what it asked for; ``cause``: a refusal's code, or a read's purpose.

    ``tenant`` None: that of the key that the actor names, if there is such a key. An operator's key has none.
    """

    action: Action
    actor: Actor
    tenant: TenantId | None
    resource_id: str
    cause: str
    session_id: str | None = None


@dataclass(slots=True)
class _Count:
    """Requests of a kind, and the first of them."""

    first: Repeated
    since: datetime
    until: datetime
    count: int = 0


_Kind = tuple[Action, str, str, str | None, str]
_Log = tuple[TenantId | None, bool]
"""Tenant, and whether it is what others do with its things: they crowd nothing else out of its minute."""


class AuditTally:
    """Counts of one process. Used from one event loop."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._counts: dict[_Kind, _Count] = {}
        self._kinds: Counter[_Log] = Counter()
        """Number of the kinds of each log; without a tenant: of keys not known yet."""

    def note(self, request: Repeated) -> None:
        """Count a request."""
        kind = _kind(request)
        most = _MOST_STRANGERS if request.tenant is None else _MOST_KINDS
        if kind not in self._counts and self._kinds[_log(request)] >= most:
            request = _unnamed(request)
            kind = _kind(request)
        now = self._clock()
        counted = self._counts.get(kind)
        if counted is None:
            counted = self._counts[kind] = _Count(request, now, now)
            self._kinds[_log(request)] += 1
        counted.until, counted.count = now, counted.count + 1

    async def write(self) -> None:
        """Write an entry for each kind that was counted. Raises ``Unavailable``; the counts are kept then."""
        counts, self._counts = self._counts, {}
        if not counts:
            return
        self._kinds.clear()
        try:
            async with self._database.write() as transaction:
                named = {one.first.actor.name for one in counts.values() if one.first.tenant is None}
                for one in _merged(counts.values(), await _owners(transaction, named)):
                    first = one.first
                    told = {"count": one.count, "cause": first.cause, "since": one.since, "until": one.until}
                    await record(
                        transaction,
                        first.actor,
                        first.action,
                        first.resource_id,
                        tenant=first.tenant,
                        now=self._clock(),
                        session_id=first.session_id,
                        after=told,
                        outcome=Outcome.REFUSED if first.action is Action.REQUEST_REFUSE else Outcome.DONE,
                    )
        except BaseException:
            for kind, one in counts.items():
                _add(self._counts, kind, one)
            self._kinds = Counter(_log(one.first) for one in self._counts.values())
            raise

    async def run(self, stopping: asyncio.Event | None = None) -> None:
        """Write every minute until ``stopping``, or until cancelled."""
        await repeat(
            self.write, seconds=WRITE_SECONDS, stopping=stopping, failed="counts of the audit log could not be written"
        )


async def write_last_counts(tally: AuditTally) -> None:
    """Write what was counted since the last write, as the process ends; without a database it is lost."""
    with suppress(WeftError):
        await tally.write()


async def _owners(session: AsyncSession, named: Collection[str]) -> dict[str, TenantId | None]:
    """Return the tenants of those of the keys that there are, None for operators' keys."""
    owners: dict[str, TenantId | None] = {}
    ordered = sorted(named)
    for begin in range(0, len(ordered), _AT_ONCE):
        some = few_lengths(ordered[begin : begin + _AT_ONCE])
        rows = await session.execute(select(ApiKey.prefix, ApiKey.tenant_id).where(ApiKey.prefix.in_(some)))
        owners |= {row.prefix: TenantId(row.tenant_id) for row in rows}
        operators = await session.scalars(select(OperatorKey.prefix).where(OperatorKey.prefix.in_(some)))
        owners |= dict.fromkeys(operators)
    return owners


def _log(request: Repeated) -> _Log:
    return request.tenant, request.actor.door is Door.SHARE


def _kind(request: Repeated) -> _Kind:
    what = request.resource_id if request.action is Action.CHECKPOINT_READ else ""
    return request.action, request.actor.name, request.cause, request.tenant, what


def _unnamed(request: Repeated) -> Repeated:
    actor = Actor(request.actor.door, UNKNOWN_KEY if request.tenant is None else OTHER_KEYS)
    return replace(request, actor=actor, session_id=None, resource_id="several")


def _merged(counts: Iterable[_Count], owners: Mapping[str, TenantId | None]) -> list[_Count]:
    """Return the counts with their tenants; those of keys that nobody has count together."""
    merged: dict[_Kind, _Count] = {}
    kinds: Counter[_Log] = Counter()
    for one in counts:
        request = one.first
        if request.tenant is None:
            name = request.actor.name
            request = replace(request, tenant=owners[name]) if name in owners else _unnamed(request)
        if request.tenant is not None and _kind(request) not in merged:
            kinds[_log(request)] += 1
            request = _unnamed(request) if kinds[_log(request)] > _MOST_KINDS else request
        _add(merged, _kind(request), _Count(request, one.since, one.until, one.count))
    return list(merged.values())


def _add(counts: dict[_Kind, _Count], kind: _Kind, more: _Count) -> None:
    found = counts.setdefault(kind, more)
    if found is not more:
        found.since, found.until = min(found.since, more.since), max(found.until, more.until)
        found.count += more.count
