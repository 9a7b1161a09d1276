"""A trainer's questions about its runs stay on indexes, however long the ledger is."""

from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url, update

from bench.ledger.plans import explain, recorded
from contracts.ledger_records import NewOperation
from contracts.operations import LoraSettings, OperationKind, OptimStep
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.wakeups import Wakeups
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.tables import Operation, Run, RunState, Session
from telemetry.telemetry import Telemetry
from tenants.run_leases import runs_of_ended_sessions
from tenants.runs import NewRun
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.runs import create_run
from tests.payloads import digest, stored

RUNS, DONE = 100, 500
COPY = """
INSERT INTO {table} ({columns})
SELECT {values} FROM {table} AS one, generate_series(1, %s) AS number
"""


def copied(connection: psycopg.Connection[tuple[object, ...]], table: str, number: int, **changed: str) -> None:
    """Copy every row of a table so often, with the columns ``changed`` to what the expressions give."""
    listed = connection.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_name = %s AND column_name <> 'position'",
        (table,),
    )
    columns = [str(name) for (name,) in listed]
    values = ", ".join(changed.get(name, f"one.{name}") for name in columns)
    connection.execute(COPY.format(table=table, columns=", ".join(columns), values=values).encode(), (number,))


@pytest.mark.parametrize("generic", [False, True])
async def test_runs_of_ended_sessions_are_found_without_a_read_of_the_ledger(
    migrated_postgres_url: str, tmp_path: Path, generic: bool
) -> None:
    database = Database(create_engine(migrated_postgres_url))
    ledger = Ledger(
        database,
        Wakeups(),
        utc_now,
        Telemetry.of("test", utc_now),
        PayloadFiles(DataFolder(tmp_path)),
    )
    async with database.write() as transaction:
        tenant = await create_tenant(transaction, name="cats", clock=utc_now)
        session = await create_session(transaction, tenant, NewSession([], None, "raw", None, None), utc_now)
        lora = LoraSettings(rank=4, alpha=32.0, seed=1)
        run = await create_run(transaction, tenant, NewRun(session, 0, "test/tiny", lora, None), utc_now)
        await transaction.execute(
            update(Run).values(state=RunState.READY, next_seq_id=DONE + 2, trainer_id="busy", last_request_at=utc_now())
        )
        await transaction.execute(update(Session).values(ended_at=utc_now()))
        step = OptimStep()
        new = NewOperation(tenant, run, 1, OperationKind.OPTIM_STEP, "test/tiny", stored(step), digest(step))
        await ledger.accept(transaction, new)
        await transaction.execute(update(Operation).values(state="done", finished_at=utc_now()))
    address = make_url(migrated_postgres_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(address, autocommit=True) as connection:
        copied(connection, "runs", RUNS, id="one.id || number", model_seq_id="number")
        copied(
            connection,
            "operations",
            RUNS * DONE,
            id="number::text",
            lane=f"one.lane || (1 + number %% {RUNS})",
            seq_id=f"2 + number / {RUNS}",
        )
        connection.execute("ANALYZE")
        async with database.read() as reader:
            with recorded(database.engine, "runs_of_ended_sessions") as sent:
                found = await runs_of_ended_sessions(reader, "busy")
        assert len(found) == RUNS + 1
        (statement,) = sent
        plan = explain(connection, statement, generic=generic)
    await database.close()
    assert [line for line in plan if "on operations" in line and "Seq Scan" in line] == [], plan
