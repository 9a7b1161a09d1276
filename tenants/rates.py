"""Rates of tenants: tokens a minute with a burst, by GCRA (the generic cell rate algorithm).

A tenant's row of a meter has one time, ``tat``: all that was charged is worked off then. It moves in the transaction that
inserts an operation, so a rate is exact over any number of processes, and a repeated request moves nothing. Work over the
rate is accepted and waits: an operation's ``rate_mark`` is its place in the line of all that was ever charged, and it may run
once no more than the burst is before it and not worked off. What an operation reserved and did not use goes back when it ends,
so those behind it run earlier.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Self, cast

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    FromClause,
    String,
    Table,
    bindparam,
    case,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from contracts.operations import OperationKind
from store.tables import Rate

rates = cast(Table, Rate.__table__)


class Meter(StrEnum):
    """Kind of tokens that a rate bounds: of training data, or of samples (prompt and every sequence to ``max_tokens``)."""

    TRAIN = "train"
    SAMPLE = "sample"

    @classmethod
    def of(cls, kind: OperationKind | str) -> Self:
        """Return the meter of operations of that kind."""
        return cls("sample" if kind == OperationKind.SAMPLE else "train")


@dataclass(frozen=True, slots=True)
class Pace:
    """A rate that a tenant is given: tokens a second, and how many of them may run at once."""

    per_second: float
    burst: int


RATE_LIMITS = tuple(f"{meter}_tokens_{part}" for meter in Meter for part in ("per_minute", "burst"))
"""Limits of which rates are made."""


def pace_of(limits: Mapping[str, int] | None, meter: Meter) -> Pace | None:
    """Return the meter's rate among limits, None for no rate. A burst that is not given is what a minute allows."""
    known = limits or {}
    a_minute = known.get(f"{meter}_tokens_per_minute", 0)
    return Pace(a_minute / 60, known.get(f"{meter}_tokens_burst", 0) or a_minute) if a_minute else None


@dataclass(frozen=True, slots=True)
class RateState:
    """State of one rate, as in its row."""

    tat: float
    pace: Pace
    charged: int

    @classmethod
    def fresh(cls, pace: Pace, now: datetime) -> Self:
        """Return the state of a rate that was never charged."""
        return cls(now.timestamp(), pace, 0)

    def debt(self, now: datetime) -> float:
        """Return the tokens that are charged and not worked off."""
        return (self.tat - now.timestamp()) * self.pace.per_second

    def wait(self, mark: int, cost: int, now: datetime) -> float:
        """Return the seconds until the operation with that mark and cost may run, 0 if it may now.

        An operation that is larger than the burst may run once nothing is before it.
        """
        before = self.debt(now) - (self.charged - mark)
        over = before - max(self.pace.burst - cost, 0)
        return max(0.0, over / self.pace.per_second)

    def charged_with(self, tokens: int, now: datetime) -> Self:
        """Return the state after a charge of ``tokens``."""
        tat = max(self.tat, now.timestamp()) + tokens / self.pace.per_second
        return replace(self, tat=tat, charged=self.charged + tokens)


def tightest(states: Iterable[RateState], now: datetime) -> RateState | None:
    """Return the state that lets new work run last, or least of it; None of none."""
    return max(states, key=lambda one: (one.wait(one.charged, 1, now), -one.pace.burst + one.debt(now)), default=None)


def state_of(row: Any) -> RateState | None:
    """Return the state in the columns ``COLUMNS`` of a row, None if the tenant has no rate."""
    if row.rate_per_second is None:
        return None
    return RateState(row.rate_tat, Pace(row.rate_per_second, row.rate_burst), row.rate_charged)


def seconds_to_wait(row: Any, cost: int, now: datetime) -> float:
    """Return the seconds until the operation of a row with ``COLUMNS`` and its ``rate_mark`` may run."""
    state = None if row.rate_mark is None else state_of(row)
    return 0.0 if state is None else state.wait(row.rate_mark, cost, now)


COLUMNS = (
    rates.c.tat.label("rate_tat"),
    rates.c.per_second.label("rate_per_second"),
    rates.c.burst.label("rate_burst"),
    rates.c.charged.label("rate_charged"),
)


def rate_joined(owner: Any, meter: Meter) -> Any:
    """Return the condition of an outer join with the row of ``owner``, a column that names the tenant."""
    return (rates.c.tenant_id == owner) & (rates.c.meter == literal_column(f"'{meter}'"))


def is_paced(mark: ColumnElement[int], cost: ColumnElement[int], at: ColumnElement[float]) -> ColumnElement[bool]:
    """Return the condition that a rate, whose row is joined, holds an operation at a time in seconds since 1970.

    NULL where there is no rate, or the operation has no ``mark``. The formula is that of ``RateState.wait``.
    """
    room = rates.c.burst - cost
    free_behind = rates.c.charged - mark + case((room > 0, room), else_=0)
    return at < rates.c.tat - free_behind / rates.c.per_second


_NOW = bindparam("rate_now", type_=Double)
_COST = bindparam("rate_cost", type_=BigInteger)
RATE_TENANT = bindparam("rate_tenant", type_=String)
"""The tenant that is charged."""
_PER_SECOND = bindparam("rate_speed", type_=Double)
_BURST = bindparam("rate_room", type_=BigInteger)


def _moved(cost: Any) -> dict[str, Any]:
    """Return the columns of a row that is charged ``cost`` at a pace that may be new: its debt in tokens stays."""
    old = func.coalesce(rates.c.per_second, _PER_SECOND)
    left = case((rates.c.tat > _NOW, (rates.c.tat - _NOW) * old), else_=0.0)
    return {"tat": _NOW + (left + cost) / _PER_SECOND, "per_second": _PER_SECOND, "burst": _BURST}


def _charge(dialect: str, after: FromClause | None = None) -> Any:
    insert = sqlite_insert(rates) if dialect == "sqlite" else postgres_insert(rates)
    values: dict[str, Any] = {
        "tenant_id": RATE_TENANT,
        "meter": bindparam("rate_meter", type_=String),
        "tat": _NOW + _COST / _PER_SECOND,
        "per_second": _PER_SECOND,
        "burst": _BURST,
        "charged": _COST,
        "returned": literal_column("0"),
    }
    changed = _moved(_COST) | {"charged": rates.c.charged + _COST}
    filled = (
        insert.values(values)
        if after is None
        else insert.from_select(list(values), select(*values.values()).select_from(after))
    )
    upsert = filled.on_conflict_do_update(index_elements=["tenant_id", "meter"], set_=changed)
    return upsert.returning((rates.c.charged - _COST).label("mark"), rates.c.tat)


CHARGE = {dialect: _charge(dialect) for dialect in ("sqlite", "postgresql")}
"""Charges a tenant, by dialect, with ``charge_keys``. Returns the mark of the first token that is charged."""


def charge_after(first: FromClause) -> Any:
    """Return ``CHARGE`` for PostgreSQL, which runs once ``first`` has given its one row."""
    return _charge("postgresql", first)


_PACED = (
    update(rates)
    .where(rates.c.tenant_id == bindparam("rate_tenant"), rates.c.meter == bindparam("rate_meter"))
    .values(_moved(0.0))
)
_UNPACED = (
    update(rates)
    .where(rates.c.tenant_id == bindparam("rate_tenant"), rates.c.meter == bindparam("rate_meter"))
    # A debt in seconds means nothing without a pace: none is left for the next one.
    .values(per_second=None, tat=0.0)
)
_GIVEN_BACK = (
    update(rates)
    .where(rates.c.tenant_id == bindparam("rate_tenant"), rates.c.meter == bindparam("rate_meter"))
    .values(tat=func.coalesce(rates.c.tat - _COST / rates.c.per_second, rates.c.tat), returned=rates.c.returned + _COST)
)
_STATES = select(rates.c.tenant_id, rates.c.meter, *COLUMNS).where(
    rates.c.tenant_id.in_(bindparam("tenants", expanding=True)),
    # A newer version's meter bounds operations that only that version accepts.
    rates.c.meter.in_(bindparam("meters", expanding=True)),
)


def charge_keys(tenant: TenantId, meter: Meter, pace: Pace, cost: int, now: datetime) -> dict[str, object]:
    """Return the parameters of ``CHARGE``."""
    return {
        "rate_tenant": tenant,
        "rate_meter": meter.value,
        "rate_now": now.timestamp(),
        "rate_cost": cost,
        "rate_speed": pace.per_second,
        "rate_room": pace.burst,
    }


async def charge(
    transaction: AsyncSession, tenant: TenantId, meter: Meter, pace: Pace, *, cost: int, now: datetime
) -> RateState:
    """Charge the tenant, and return the state after it. The mark of the first token is ``cost`` before the end of the line."""
    keys = charge_keys(tenant, meter, pace, cost, now)
    row = (await transaction.execute(CHARGE[transaction.get_bind().dialect.name], keys)).one()
    return RateState(row.tat, pace, row.mark + cost)


async def set_pace(transaction: AsyncSession, tenant: TenantId, meter: Meter, pace: Pace | None, now: datetime) -> None:
    """Let what is charged already be worked off at the new pace; without one, nothing waits any more."""
    keys = {"rate_tenant": tenant, "rate_meter": meter.value}
    if pace is None:
        await transaction.execute(_UNPACED, keys)
    else:
        moved = {"rate_now": now.timestamp(), "rate_speed": pace.per_second, "rate_room": pace.burst}
        await transaction.execute(_PACED, keys | moved)


async def give_back(transaction: AsyncSession, rests: Iterable[tuple[tuple[TenantId, Meter], int]]) -> None:
    """Give tokens back that were charged and not used. Rows are locked in the order of their keys."""
    keys = [
        {"rate_tenant": tenant, "rate_meter": meter.value, "rate_cost": rest}
        for (tenant, meter), rest in sorted(rests)
        if rest
    ]
    if keys:
        await transaction.execute(_GIVEN_BACK, keys)


async def rate_states(session: AsyncSession, tenants: Iterable[TenantId]) -> dict[tuple[TenantId, Meter], RateState]:
    """Return the state of each rate of ``tenants`` that was ever charged and stands."""
    rows = await session.execute(_STATES, {"tenants": sorted(tenants), "meters": [*Meter]})
    found = {(TenantId(row.tenant_id), Meter(row.meter)): state_of(row) for row in rows}
    return {key: state for key, state in found.items() if state is not None}
