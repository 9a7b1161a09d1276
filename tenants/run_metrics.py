"""Users' own metrics of runs, such as a reward or the loss of an evaluation: idempotent by run, step and name."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any
from typing import cast as cast_type

import orjson
from sqlalchemy import (
    JSON,
    BigInteger,
    BindParameter,
    ColumnElement,
    Double,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    cast,
    column,
    func,
    select,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import Insert
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound
from contracts.ids import TenantId
from store.inserts import replacing_insert
from store.tables import Run, RunMetric
from tenants.limits import Limits

MOST_NAMES = 200
"""Names of metrics that one run may have."""
MOST_VALUES = 2000
"""Values that one query returns, and that one request may bring."""

_COUNTED_EVERY = 1000
"""Values of a run at each of which all of its tenant's are counted: that reads a row of each of the tenant's runs."""


@dataclass(frozen=True, slots=True)
class MetricValue:
    """Value of a metric at a step of the user's own count. ``value`` None: a number that is not finite."""

    name: str
    step: int
    value: float | None
    at: datetime


async def record_metrics(
    transaction: AsyncSession,
    tenant: TenantId,
    run_id: str,
    values: Mapping[tuple[str, int], float | None],
    *,
    limits: Limits,
    now: datetime,
) -> None:
    """Record values by name and step. A value that is there is replaced, so a repeat changes nothing.

    Raises ``NotFound``, and ``InvalidRequest`` at a limit of the tenant's; nothing is recorded then.
    """
    run = (
        await transaction.execute(
            select(Run.metric_names, Run.metric_rows).where(Run.id == run_id, Run.tenant_id == tenant).with_for_update()
        )
    ).one_or_none()
    if run is None:
        raise NotFound(f"no model {run_id[:150]!r}")
    known = run.metric_names or []
    names = sorted({name for name, _ in values})
    new_names = [name for name in names if name not in known]
    if len(known) + len(new_names) > MOST_NAMES:
        raise InvalidRequest(
            f"the run has metrics of {len(known)} names, and {len(new_names)} more would pass {MOST_NAMES}; use names again"
        )
    new = len(values) - await _count_present(transaction, run_id, values)
    if run.metric_rows + new > limits.run_metrics:
        raise InvalidRequest(
            f"the run has {run.metric_rows} values of metrics, and {new} more would pass your limit of {limits.run_metrics} "
            "(run_metrics); log fewer steps"
        )
    if (run.metric_rows + new) // _COUNTED_EVERY > run.metric_rows // _COUNTED_EVERY:
        await _check_all_runs(transaction, tenant, new, limits.tenant_metrics)
    await _record(transaction, {"run_id": run_id, "tenant_id": tenant, "at": now}, values)
    await transaction.execute(
        update(Run).where(Run.id == run_id).values(metric_names=known + new_names, metric_rows=run.metric_rows + new)
    )


async def _record(
    transaction: AsyncSession, same: Mapping[str, Any], values: Mapping[tuple[str, int], float | None]
) -> None:
    """Insert the values, or replace those that are there, with ``same`` in the other columns."""
    if transaction.get_bind().dialect.name == "sqlite":
        rows = [{**same, "name": name, "step": step, "value": value} for (name, step), value in sorted(values.items())]
        await transaction.execute(replacing_insert(transaction, RunMetric), rows)
        return
    # One text: two thousand rows of parameters hold the event loop for many milliseconds.
    rows_text = orjson.dumps([(name, step, value) for (name, step), value in sorted(values.items())]).decode()
    await transaction.execute(_recorded(), {**same, "rows": rows_text})


@cache
def _recorded() -> Insert:
    """Return the statement, of PostgreSQL, that records a JSON list of names, steps and values."""
    table = cast_type(Table, RunMetric.__table__)
    rows = func.json_array_elements(cast(bindparam("rows", type_=Text()), JSON)).table_valued(column("value", JSON))
    given = {
        "name": rows.c.value[0].as_string(),
        "step": cast(rows.c.value[1].as_string(), BigInteger),
        "value": cast(rows.c.value[2].as_string(), Double),
    }
    columns = {one.name: given.get(one.name, bindparam(one.name, type_=one.type)) for one in table.c}
    insert = postgres_insert(table).from_select(list(columns), select(*columns.values()).select_from(rows))
    return insert.on_conflict_do_update(
        index_elements=list(table.primary_key),
        set_={one.name: insert.excluded[one.name] for one in table.c if not one.primary_key},
    )


async def _count_present(session: AsyncSession, run_id: str, places: Collection[tuple[str, int]]) -> int:
    """Count those of the names and steps at which the run has a value, in one statement however many names there are."""
    asked = {"run": run_id, "places": orjson.dumps(list(places)).decode()}
    return await session.scalar(_present(session.get_bind().dialect.name), asked) or 0


# Cached, since building the statement takes longer than executing it.
@cache
def _present(dialect: str) -> Select[Any]:
    """Return the statement, to which the places are one JSON text: a list of them would be a statement of each length."""
    places: BindParameter[str] = bindparam("places", type_=Text())
    name: ColumnElement[str]
    step: ColumnElement[int]
    if dialect == "sqlite":
        rows = func.json_each(places).table_valued("value")
        name, step = func.json_extract(rows.c.value, "$[0]"), func.json_extract(rows.c.value, "$[1]")
    else:
        rows = func.json_array_elements(cast(places, JSON)).table_valued(column("value", JSON))
        name, step = rows.c.value[0].as_string(), cast(rows.c.value[1].as_string(), BigInteger)
    metric = and_(RunMetric.run_id == bindparam("run"), RunMetric.name == name, RunMetric.step == step)
    # SQLite would begin a plain join at all values of the run.
    return select(func.count(RunMetric.step)).select_from(rows).outerjoin(RunMetric, metric)


async def _check_all_runs(transaction: AsyncSession, tenant: TenantId, new: int, most: int) -> None:
    """Raise ``InvalidRequest`` if ``new`` values more would pass the tenant's limit of all its runs."""
    there = await transaction.scalar(select(func.sum(Run.metric_rows)).where(Run.tenant_id == tenant)) or 0
    if there + new > most:
        raise InvalidRequest(
            f"your runs have {there} values of metrics, and {new} more would pass your limit of {most} (tenant_metrics); "
            "log fewer steps, or ask the service's operator for more"
        )


async def metric_values(session: AsyncSession, run: str, name: str, *, after: int, most: int) -> list[MetricValue]:
    """Return at most ``most`` values of the metric at steps after ``after``, in order."""
    rows = await session.scalars(
        select(RunMetric)
        .where(RunMetric.run_id == run, RunMetric.name == name, RunMetric.step > after)
        .order_by(RunMetric.step)
        .limit(min(most, MOST_VALUES))
    )
    return [MetricValue(row.name, row.step, row.value, row.at) for row in rows]


async def last_values(
    session: AsyncSession, run: str, names: Sequence[str], *, most: int
) -> dict[str, list[MetricValue]]:
    """Return at most ``most`` values of each of the metrics at its last steps, the last one first, by name."""
    if not names:
        return {}
    columns = (RunMetric.name, RunMetric.step, RunMetric.value, RunMetric.at)
    newest = (
        select(*columns)
        .where(RunMetric.run_id == run, RunMetric.name == name)
        .order_by(RunMetric.step.desc())
        .limit(most)
        for name in names
    )
    rows = await session.execute(union_all(*(select(one.subquery()) for one in newest)))
    found: defaultdict[str, list[MetricValue]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.step, reverse=True):
        found[row.name].append(MetricValue(row.name, row.step, row.value, row.at))
    return dict(found)
