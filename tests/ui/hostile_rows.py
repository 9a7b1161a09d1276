"""Hostile texts in every column that keeps a text: the columns are the schema's, less those that hold names of the service's own.

A new column is hostile by itself. Its table must have a row of the tenant, or the test that uses this fails.
"""

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import JSON, Column, Date, DateTime, LargeBinary, Numeric, String, Table, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from store.database import Database
from store.tables import Base, Webhook

ELEMENT = "xss-mark"
"""Element that each text would make."""
SUM = 1237 * 1009
"""Number that a template language would make of each text."""
LONGEST = 3000
_SHORT = f"\"><{ELEMENT}>'"
_TEXT = (
    f"=HYPERLINK(1)'\"></td></script></textarea><{ELEMENT}></{ELEMENT}><img src=x onerror=document.title='hit'>"
    "{{1237*1009}}${1237*1009}{% raw %}\u202e\u200b\x85 & "
)
_ADDRESS = f"javascript:document.title='hit'//\"><{ELEMENT}>{{{{1237*1009}}}}"

OWN = {
    # Ids, hashes, and what only names another row.
    "id", "tenant_id", "event_id", "operation_id", "checkpoint_id", "run_id", "session_id", "live_run_id", "process_id",
    "scope_id", "prefix", "operator", "made_by", "digest", "fingerprint", "secret_hash", "idempotency_key", "lane", "asked",
    "taken_by", "held_by", "process", "trainer_id", "target", "about", "trace_id", "version", "replica",
    # Words of the service's own lists.
    "kind", "state", "mode", "role", "door", "action", "resource", "outcome", "wanted", "segment", "meter", "period", "scope",
    "period_end", "currency", "service_class", "suspend_mode", "prior_mode", "pool_state", "loss_per", "loss_fns", "optimizer",
    "on_stale", "swap_policy", "end_reason", "error_category", "type", "day", "limits", "scopes", "projects", "base_models",
    "networks", "events", "resident_runs", "project",
    # Names that the operator gives when the service starts, or of places on its disk; encrypted secrets.
    "base_model", "directory", "snapshot_dir", "secrets", "answer",
}  # fmt: skip
"""Names of columns that hold no text of a user's, a client's or a failure's."""
NAMES = {("checkpoints", "name"), ("deleted_checkpoints", "name"), ("webhooks", "name")}
"""Names in addresses, of which the API takes none that is hostile."""
UNSEEN = {"housekeeping_steps", "version_orders"}
"""Tables with the service's own words alone: names and places of its steps, and orders between its processes."""
_GROWS = {"audit_entries"}
"""Tables whose rows never change."""
_GIVEN: dict[str, dict[str, Any]] = {
    "weight_jobs": {"kind": "merge", "state": "failed"},
    "webhook_events": {"type": "run.created", "body": "{}"},
    "worker_processes": {"kind": "trainer", "pool_state": "working", "resident_runs": []},
    "run_events": {"kind": "restored"},
    # To a trainer that is not there: the directive stays.
    "directed_runs": {"wanted": "move", "target": "trainer-elsewhere"},
    "ordered_replicas": {"wanted": "drain", "base_model": "weft/hostile"},
}
"""Values of rows that are made here, since nothing that the test does makes one."""


def hostile(column: Column[Any]) -> str:
    """Return a hostile text that fills the column."""
    most = min(getattr(column.type, "length", None) or LONGEST, LONGEST)
    text = _ADDRESS if column.name in ("url", "model_path", "result_path") else _TEXT
    if most < len(text):
        text = _SHORT
    return (text + "W" * most)[:most]


def free_columns() -> Iterator[tuple[Table, Column[Any]]]:
    """Return the columns that keep texts from elsewhere."""
    for table in Base.metadata.sorted_tables:
        for column in table.columns:
            is_text = isinstance(column.type, String | JSON) and (table.name, column.name) not in NAMES
            if is_text and column.name not in OWN and not column.foreign_keys and table.name not in UNSEEN:
                yield table, column


async def make_hostile(database: Database, tenant: str, run: str) -> None:
    """Put hostile texts into every free column of the tenant's rows and of the operators', and make the rows that lack."""
    async with database.write() as transaction:
        for table in {table.name: table for table, _ in free_columns()}.values():
            if table.name in _GROWS or not await _count(transaction, table, tenant):
                await transaction.execute(insert(table).values(_row(table, tenant, run)))
        for table, column in free_columns():
            if table.name in _GROWS:
                continue
            value = _hostile_value(column)
            if any(column.name in index.columns for index in table.indexes if index.unique) or column.primary_key:
                for place, key in enumerate(list(await transaction.scalars(select(column).where(*_of(table, tenant))))):
                    own = update(table).where(column == key, *_of(table, tenant))
                    await transaction.execute(own.values({column: f"{value[:-2]}{place:02}"}))
                continue
            await transaction.execute(update(table).where(*_of(table, tenant)).values({column: value}))


def _hostile_value(column: Column[Any]) -> Any:
    text = hostile(column)
    if (column.table.name, column.name) == ("webhook_events", "body"):
        return json.dumps({text: text})
    if isinstance(column.type, JSON):
        return [text] if column.name in ("tags", "metric_names") else {text: text}
    return text


async def columns_without(database: Database, tenant: str) -> list[str]:
    """Return the free columns of which no row is hostile."""
    found = []
    async with database.read() as session:
        for table, column in free_columns():
            values = [str(one) for one in await session.scalars(select(column).where(*_of(table, tenant)))]
            if not any(ELEMENT in one for one in values):
                found.append(f"{table.name}.{column.name}")
    return found


def _of(table: Table, tenant: str) -> list[Any]:
    """Return the condition of the tenant's rows: a table without tenants is the operators', and wholly hostile."""
    if table.name == "tenants":
        return [table.c.id == tenant]
    if table.name == "worker_processes":
        return [table.c.id.like("hostile%")]
    if table.name == "webhook_events":
        return [table.c.webhook_id.in_(_webhooks_of(tenant))]
    return [table.c.tenant_id == tenant] if "tenant_id" in table.c else []


def _webhooks_of(tenant: str) -> Any:
    return select(Webhook.id).where(Webhook.tenant_id == tenant)


async def _count(session: AsyncSession, table: Table, tenant: str) -> int:
    return await session.scalar(select(func.count()).select_from(table).where(*_of(table, tenant))) or 0


def _row(table: Table, tenant: str, run: str) -> dict[str, Any]:
    known: dict[str, Any] = {"tenant_id": tenant, "run_id": run, "session_id": run.partition(":")[0]}
    known["webhook_id"] = _webhooks_of(tenant).scalar_subquery()
    free = {column.name for one, column in free_columns() if one is table}
    row: dict[str, Any] = {}
    for column in table.columns:
        if column.name in known:
            row[column.name] = known[column.name]
        elif column.name in free:
            row[column.name] = _hostile_value(column)
        elif not column.nullable and column.server_default is None and column.default is None:
            if column.primary_key and column.autoincrement is True:
                continue
            row[column.name] = _value(column)
    return row | _GIVEN.get(table.name, {})


def _value(column: Column[Any]) -> Any:
    kind = column.type
    # An end that is still to come: housekeeping removes the row of a process whose lease is over.
    now = datetime.now(UTC) + timedelta(hours=1 if column.name == "expires_at" else -1)
    if isinstance(kind, String):
        return ("hostile-" + uuid.uuid4().hex)[: kind.length or 40]
    if isinstance(kind, JSON):
        return {}
    if isinstance(kind, LargeBinary):
        return b""
    if isinstance(kind, Numeric):
        return 0
    if isinstance(kind, Date):
        return now.date()
    return now if isinstance(getattr(kind, "impl", kind), DateTime) else 1
