"""Housekeeping goes on however many rows there are that are kept."""

from datetime import timedelta
from pathlib import Path

from sqlalchemy import text

from migrations.upgrade import upgrade
from store.tables import Checkpoint, Sampler
from tests.workers.housekeeping.conftest import open_house
from workers.housekeeping.schedule import StepName

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


async def test_versions_retire_beside_150_000_samplers(postgres_url: str, tmp_path: Path) -> None:
    """A statement over all samplers runs into the time limit of 30 s, and then nothing at all is deleted any more."""
    upgrade(postgres_url)
    async with open_house(postgres_url, tmp_path) as house:
        tenant, session, run = await house.run("first")
        keys = {"tenant": tenant, "session": session, "now": house.now}
        async with house.database.write() as transaction:
            await transaction.execute(_SAMPLERS, {**keys, "samplers": SAMPLERS})
            del keys["session"]
            await transaction.execute(_VERSIONS, {**keys, "run": run, "versions": VERSIONS})
            # With statistics, as a living service has them, the planner knows that so many do not fit into memory.
            await transaction.execute(text("ANALYZE"))
        house.now += timedelta(hours=2)
        record = await house.keeping.run_step(StepName.RETIRE_VERSIONS)
        assert record.failing_since is None
        assert record.handled >= 100
        assert record.seconds < 15
        assert await house.count(Checkpoint) == VERSIONS - record.handled
        assert await house.count(Sampler) == SAMPLERS
