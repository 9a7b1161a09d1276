"""Bytes that one tenant has stored: its rows, and its files in the data folder."""

from pathlib import Path
from uuid import UUID

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    LargeBinary,
    Table,
    cast,
    create_engine,
    func,
    literal_column,
    make_url,
    select,
)

from ledger.payload_files import PAYLOADS
from store.settings import Settings
from store.tables import Base, Checkpoint, OperationPayload, Run, Tenant

_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}


def stored_bytes(settings: Settings, tenant_name: str) -> int:
    """Return the bytes of the tenant's rows, without indexes, and of its checkpoints, snapshots and payload files."""
    url = make_url(settings.resolved_database_url())
    engine = create_engine(url.set(drivername=_DRIVERS[url.get_backend_name()]))
    try:
        with engine.connect() as connection:
            tenant = connection.execute(select(Tenant.id).where(Tenant.name == tenant_name)).scalar_one()
            rows = sum(_rows(connection, table, tenant) for table in Base.metadata.sorted_tables)
            return rows + _folders(connection, tenant) + _payload_files(connection, tenant, settings.data_dir)
    finally:
        engine.dispose()


def _rows(connection: Connection, table: Table, tenant: str) -> int:
    if "tenant_id" not in table.c:
        return 0
    size = func.sum(_size(table, is_sqlite=connection.dialect.name == "sqlite"))
    return int(connection.execute(select(size).where(table.c.tenant_id == tenant)).scalar() or 0)


def _size(table: Table, *, is_sqlite: bool) -> ColumnElement[int]:
    """Return a row's size in bytes; on PostgreSQL as it is stored, compressed."""
    if not is_sqlite:
        return literal_column(f'pg_column_size("{table.name}".*)')

    def length(column: Column[object]) -> ColumnElement[int]:
        return func.coalesce(func.length(cast(column, LargeBinary)), 0)

    first, *rest = table.columns
    return sum((length(column) for column in rest), length(first))


def _folders(connection: Connection, tenant: str) -> int:
    checkpoints = select(func.sum(Checkpoint.size_bytes)).where(Checkpoint.tenant_id == tenant)
    snapshots = select(func.sum(Run.snapshot_bytes)).where(Run.tenant_id == tenant, Run.snapshot_dir.is_not(None))
    return sum(int(connection.execute(one).scalar() or 0) for one in (checkpoints, snapshots))


def _payload_files(connection: Connection, tenant: str, data: Path) -> int:
    in_files = select(OperationPayload.operation_id).where(
        OperationPayload.tenant_id == tenant, OperationPayload.file_digest.is_not(None)
    )
    found = 0
    for operation in connection.execute(in_files).scalars():
        name = str(UUID(operation))
        path = data / PAYLOADS / name[:2] / name
        found += path.stat().st_size if path.exists() else 0
    return found
