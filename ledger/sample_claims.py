"""Claims of samples: which samples wait and for whom, who draws one, and who gives it back.

A sampling process chooses among the oldest waiting samples of each tenant, so the samples of a flood do not stand before
those of others. The statements read as many rows as they return, however many samples are pending: tenants are found by
skipping along an index from one to the next.

A sample that cannot run yet is given back. One behind its adapter's closed gate is *held* by it, so that nobody claims it
until the gate is open.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any, cast

from sqlalchemy import (
    ColumnElement,
    Double,
    FromClause,
    Select,
    Table,
    bindparam,
    delete,
    exists,
    func,
    literal,
    select,
    true,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RequestId, RunId, TenantId
from ledger.statements import operations, tenants
from store.batcher import few_lengths
from store.pending_operations import IS_HELD, IS_PENDING, IS_SAMPLE, pending_sample
from store.tables import SampleInFlight
from tenants.budgets import budget_keys, is_spent_for
from tenants.rate_lines import is_held, next_of_lines
from tenants.rates import COLUMNS, Meter, rate_joined, rates, seconds_to_wait
from tenants.shares import weight

Claim = tuple[RequestId, int]
"""A sample and the number of one of its claims, the claim's fencing token."""

MOST_TENANTS = 256
"""Most tenants whose waiting samples are read by one query. The next query goes on behind the last of them."""
_AT_ONCE = 512
"""Most held gates read by one query."""


@dataclass(frozen=True, slots=True)
class WaitingSample:
    """A sample that no process has claimed."""

    id: RequestId
    tenant: TenantId
    share: float
    cost: int
    """Tokens that it may take at most, and 1 at least: prompt, and every sequence to ``max_tokens``."""
    accepted_at: datetime
    lane: str
    is_fresh: bool
    """True if no process has ended while it drew the sample."""
    seconds: float = 0.0
    """Seconds that it waits for its tenant's rate."""


@dataclass(frozen=True, slots=True)
class WaitingSamples:
    """Oldest waiting samples by tenant, oldest first.

    ``seconds_to_lines``: until the next one may run that the rate of a key or a project holds; infinity if none does.
    """

    of: dict[str, list[WaitingSample]]
    seconds_to_lines: float = inf


def _steps(table: FromClause, column: str, condition: ColumnElement[bool], after: ColumnElement[Any], most: int) -> Any:
    """Return a recursive table of the distinct values of ``column`` beyond ``after``, in order: one index probe for each."""
    first = select(func.min(table.c[column])).where(condition, table.c[column] > after).scalar_subquery()
    steps = select(first.label("value"), literal(1).label("number")).cte("steps", recursive=True)
    following = select(func.min(table.c[column])).where(condition, table.c[column] > steps.c.value).scalar_subquery()
    return steps.union_all(
        select(following, steps.c.number + 1).where(steps.c.value.is_not(None), steps.c.number < most)
    )


def _waits(table: FromClause) -> ColumnElement[bool]:
    return pending_sample(table) & table.c.taken_by.is_(None) & table.c.held_by.is_(None)


_AT = bindparam("rate_at", type_=Double)
_OF_SAMPLE = (
    *(operations.c[name] for name in ("reserved_tokens", "created_at", "lane", "attempts", "rate_mark")),
    *COLUMNS,
)


def _waiting() -> dict[str, Select[Any]]:
    """Return the query for the oldest waiting samples of each tenant, by dialect."""
    base: ColumnElement[str] = bindparam("base")
    known = operations.alias("known")
    owners = _steps(known, "tenant_id", _waits(known) & (known.c.base_model == base), bindparam("after"), MOST_TENANTS)
    heads = operations.alias("heads")
    oldest = (
        select(heads.c.position)
        .where(
            _waits(heads),
            heads.c.base_model == base,
            heads.c.tenant_id == owners.c.value,
            ~is_spent_for(heads.c.tenant_id, heads.c.key_id, heads.c.lane),
            # Left out here, so that a key's samples do not stand before those of its tenant's others.
            ~is_held(heads.c.id, _AT),
        )
        .order_by(heads.c.position)
        .limit(bindparam("each"))
    )
    owner = (owners.c.value.label("tenant_id"), weight(tenants.c), tenants.c.suspended_at)
    next_of_all = next_of_lines(Meter.SAMPLE, base, _AT).label("next_of_lines")
    columns = (operations.c.id, *owner, *_OF_SAMPLE, next_of_all)
    of_tenant = oldest.correlate(owners)
    of_rate = tenants.outerjoin(rates, rate_joined(tenants.c.id, Meter.SAMPLE))
    by_row = select(*columns).join_from(owners, of_rate, tenants.c.id == owners.c.value)
    lateral = of_tenant.lateral("oldest")
    return {
        # A tenant whose samples all wait for a budget has a row, too: the next look begins behind the last tenant.
        "postgresql": by_row.outerjoin(lateral, true())
        .outerjoin(operations, operations.c.position == lateral.c.position)
        .order_by(owners.c.number, operations.c.position),
        "sqlite": by_row.outerjoin(operations, operations.c.position.in_(of_tenant)).order_by(
            owners.c.number, operations.c.position
        ),
    }


_WAITING = _waiting()

_CLAIM = (
    update(operations)
    .where(
        operations.c.position.in_(
            select(operations.c.position)
            .where(operations.c.id.in_(bindparam("ids", expanding=True)), IS_PENDING, operations.c.taken_by.is_(None))
            .with_for_update(skip_locked=True)
        )
    )
    .values(taken_by=bindparam("process"), claims=operations.c.claims + 1)
    .returning(operations.c.id, operations.c.claims)
)

_GIVE_BACK = (
    update(operations)
    .where(
        operations.c.id.in_(bindparam("ids", expanding=True)),
        IS_PENDING,
        IS_SAMPLE,
        operations.c.taken_by == bindparam("process"),
        operations.c.claims == bindparam("claim"),
    )
    .values(taken_by=None, held_by=bindparam("gate"))
)

_HOLD = (
    update(operations)
    .where(
        operations.c.id.in_(bindparam("ids", expanding=True)), IS_PENDING, IS_SAMPLE, operations.c.taken_by.is_(None)
    )
    .values(held_by=bindparam("gate"))
)

_RETURN_STRAYS = (
    update(operations)
    .where(
        IS_PENDING,
        IS_SAMPLE,
        operations.c.taken_by == bindparam("process"),
        operations.c.id.not_in(bindparam("but", expanding=True)),
    )
    .values(taken_by=None)
)

_in_flight = cast(Table, SampleInFlight.__table__)
# Skips locked rows: the transaction that holds the lock is about to delete or to replace the row.
_CLEAR_ENDED = (
    delete(_in_flight)
    .where(
        _in_flight.c.operation_id.in_(
            select(_in_flight.c.operation_id)
            .where(
                _in_flight.c.process == bindparam("process"),
                ~exists().where(operations.c.id == _in_flight.c.operation_id, IS_PENDING),
            )
            .with_for_update(skip_locked=True)
        )
    )
    .returning(_in_flight.c.operation_id)
)

_RETURN_OF = (
    update(operations)
    .where(IS_PENDING, IS_SAMPLE, operations.c.taken_by.in_(bindparam("processes", expanding=True)))
    .values(taken_by=None)
)


def _holding() -> Select[Any]:
    known = operations.alias("known")
    condition = pending_sample(known) & known.c.held_by.is_not(None) & (known.c.base_model == bindparam("base"))
    gates = _steps(known, "held_by", condition, bindparam("after"), _AT_ONCE)
    return select(gates.c.value).where(gates.c.value.is_not(None)).order_by(gates.c.number)


_HOLDING = _holding()

_RELEASE = (
    update(operations)
    .where(
        IS_PENDING,
        IS_SAMPLE,
        IS_HELD,
        operations.c.base_model == bindparam("base"),
        operations.c.held_by.in_(bindparam("gates", expanding=True)),
    )
    .values(held_by=None)
)


async def waiting_samples(
    session: AsyncSession, base_model: str, *, of_each: int, now: datetime, after_tenant: str = ""
) -> WaitingSamples:
    """Return the oldest ``of_each`` waiting samples of each tenant of ``base_model`` behind ``after_tenant``, oldest first.

    A suspended tenant has none, and neither has a spent budget: they wait until it is resumed or raised. Those that the
    rate of a key or a project holds are left out, too. Samples that wait for their tenant's rate are returned, and say how long.
    """
    at = now.timestamp()
    keys = {"base": base_model, "after": after_tenant, "each": of_each, **budget_keys(now), "rate_at": at}
    found: dict[str, list[WaitingSample]] = {}
    seconds_to_lines = inf
    for row in await session.execute(_WAITING[session.get_bind().dialect.name], keys):
        tenant = TenantId(row.tenant_id)
        samples = found.setdefault(tenant, [])
        if row.next_of_lines is not None:
            seconds_to_lines = row.next_of_lines - at
        if row.suspended_at is None and row.id is not None:
            cost = max(1, row.reserved_tokens)
            seconds = seconds_to_wait(row, row.reserved_tokens, now)
            fresh = row.attempts == 0
            samples.append(
                WaitingSample(RequestId(row.id), tenant, row.share, cost, row.created_at, row.lane, fresh, seconds)
            )
    return WaitingSamples(found, seconds_to_lines)


async def claim_samples(transaction: AsyncSession, ids: Sequence[RequestId], *, process: str) -> list[Claim]:
    """Claim those of the samples for ``process`` that are still unclaimed, and return their claims."""
    if not ids:
        return []
    claimed = await transaction.execute(_CLAIM, {"ids": few_lengths(sorted(ids)), "process": process})
    return [(row.id, row.claims) for row in claimed]


async def give_back(
    transaction: AsyncSession, claims: Collection[Claim], *, process: str, gate: RunId | None = None
) -> None:
    """Return samples that ``process`` has by these claims, for any process to claim; those that ``gate`` holds once it is open.

    A sample that has been claimed anew stays with the newer claim, so that the call may be repeated.
    """
    by_number: dict[int, list[RequestId]] = {}
    for sample, number in claims:
        by_number.setdefault(number, []).append(sample)
    for number, ids in sorted(by_number.items()):
        keys = {"ids": few_lengths(sorted(ids)), "process": process, "claim": number, "gate": gate}
        await transaction.execute(_GIVE_BACK, keys)


async def hold_waiting(transaction: AsyncSession, ids: Sequence[RequestId], gate: RunId) -> None:
    """Let ``gate`` hold those of the samples that are still unclaimed, so that nobody claims them until it is open."""
    await transaction.execute(_HOLD, {"ids": few_lengths(sorted(ids)), "gate": gate})


async def return_strays(transaction: AsyncSession, *, process: str, but: Collection[str]) -> None:
    """Return the samples that ``process`` has claimed, except ``but``."""
    await transaction.execute(_RETURN_STRAYS, {"process": process, "but": list(but) or [""]})


async def clear_ended_in_flight(transaction: AsyncSession, *, process: str) -> bool:
    """Delete the in-flight rows of ``process`` whose samples have ended. Return whether there were any."""
    return bool((await transaction.execute(_CLEAR_ENDED, {"process": process})).scalars().all())


async def return_samples_of(transaction: AsyncSession, processes: Sequence[str]) -> None:
    """Return every pending sample that one of ``processes`` has claimed, so that another process can claim it."""
    await transaction.execute(_RETURN_OF, {"processes": list(processes)})


async def gates_that_hold(session: AsyncSession, base_model: str) -> list[str]:
    """Return every gate that holds samples of ``base_model``: closed gates of one tenant hide no open one of another's."""
    found: list[str] = []
    while True:
        after = found[-1] if found else ""
        page = list((await session.execute(_HOLDING, {"base": base_model, "after": after})).scalars())
        found += page
        if len(page) < _AT_ONCE:
            return found


async def release_held(transaction: AsyncSession, base_model: str, gates: Sequence[str]) -> None:
    """Let the samples that the gates hold be claimed."""
    await transaction.execute(_RELEASE, {"base": base_model, "gates": few_lengths(list(gates))})
