"""Housekeeping goes on however many rows there are that are kept."""

from datetime import timedelta
from pathlib import Path

import psycopg
from sqlalchemy import make_url, text, update

from bench.ledger.plans import explain, recorded
from store.tables import Checkpoint, Sampler, Session
from tests.workers.housekeeping.conftest import open_house
from tests.workers.presence import be_present
from workers.housekeeping.schedule import StepName
from workers.housekeeping.step import SMALL

SAMPLERS, VERSIONS = 150_000, 20_000
_SAMPLERS = text(
    "INSERT INTO samplers (id, tenant_id, session_id, sampling_session_seq_id, base_model, checkpoint_id, created_at) "
    "SELECT :session || ':sample:' || i, :tenant, :session, i, 'base', md5('used' || i), :now "
    "FROM generate_series(1, :samplers) i"
)
_VERSIONS = text(
    "INSERT INTO checkpoints (id, tenant_id, run_id, segment, name, directory, size_bytes, listed, public, created_at) "
    "SELECT md5('c' || i), :tenant, :run, 'sampler_weights', 'v' || i, 'checkpoints/' || md5('c' || i), 1, false, false, :now "
    "FROM generate_series(1, :versions) i"
)


async def test_versions_retire_beside_150_000_samplers(migrated_postgres_url: str, tmp_path: Path) -> None:
    """A statement over all samplers runs into the time limit of 30 s, and then nothing at all is deleted any more.

    Each transaction is a small one, and reads no table from end to end. A second tenant's version that is followed stays.
    """
    async with open_house(migrated_postgres_url, tmp_path) as house:
        tenant, session, run = await house.run("first")
        other, other_session, other_run = await house.run("second")
        followed = await house.checkpoint(other, other_run, "followed", listed=False)
        await house.sampler(other, other_session, 0, followed, live=other_run)
        keys = {"tenant": tenant, "session": session, "now": house.now}
        async with house.database.write() as transaction:
            await transaction.execute(_SAMPLERS, {**keys, "samplers": SAMPLERS})
            del keys["session"]
            await transaction.execute(_VERSIONS, {**keys, "run": run, "versions": VERSIONS})
            # With statistics, as a living service has them, the planner knows that so many do not fit into memory.
            await transaction.execute(text("ANALYZE"))
        house.now += timedelta(hours=2)
        async with house.database.write() as transaction:
            await transaction.execute(update(Session).values(last_seen_at=house.now))
        await be_present(house.runtime)
        with recorded(house.database.engine, "retire") as statements:
            batch = await house.keeping._steps.by_name[StepName.RETIRE_VERSIONS].work(None)
        assert 0 < batch.handled <= SMALL
        address = make_url(migrated_postgres_url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(address, autocommit=True) as connection:
            plans = [line for one in statements for line in explain(connection, one, generic=False)]
        assert [line for line in plans if "Seq Scan on samplers" in line] == []
        record = await house.keeping.run_step(StepName.RETIRE_VERSIONS)
        assert record.failing_since is None
        assert record.handled >= SMALL
        async with house.database.read() as reading:
            assert await reading.get(Checkpoint, followed) is not None
        assert await house.count(Checkpoint) == 1 + VERSIONS - batch.handled - record.handled
        assert await house.count(Sampler) == 1 + SAMPLERS
