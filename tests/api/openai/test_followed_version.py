"""A request points its run's standing sampler at the version to follow, and never back at an older one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api.openai import generation
from api.openai.models import NamedModel
from contracts.ids import CheckpointId, SamplerId
from store.clock import utc_now
from store.database import Database, create_engine
from store.tables import Sampler
from tenants.samplers import publish_live
from tests.workers.runtimes import make_runtime
from tests.workers.sampling.test_dispatch import BASE, LiveRun, live_run, record


class Asker:
    """A tenant that asks its run for samples by the run's id."""

    def __init__(self, database: Database, live: LiveRun, folder: Path) -> None:
        self.live = live
        self._database = database
        self._services: Any = SimpleNamespace(runtime=make_runtime(database, folder, utc_now))
        self._caller: Any = SimpleNamespace(tenant=live.tenant, home_project=None)

    async def ask(self) -> SamplerId:
        """Find the standing sampler, as each request does."""
        model = NamedModel(self.live.run, BASE, version=self.live.version, run=self.live.run)
        return await generation._sampler(self._services, self._caller, model)

    async def publish(self) -> CheckpointId:
        """Save a version, which moves the run's live samplers."""
        async with self._database.write() as saving:
            new = await record(saving, self.live.tenant, self.live.run)
            await publish_live(saving, self.live.tenant, self.live.run, new, utc_now)
        return new

    async def at(self, sampler: SamplerId) -> tuple[str | None, int]:
        """Return the sampler's version and the number of its publications."""
        async with self._database.read() as session:
            row = await session.get_one(Sampler, sampler)
            return row.checkpoint_id, row.publications


async def test_a_version_that_is_saved_while_a_request_reads_the_older_one_stays(
    migrated_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save commits between the request's read and its update. Another tenant's sampler stays as it is."""
    database = Database(create_engine(migrated_postgres_url))
    cat, dog = [Asker(database, await live_run(database, name), tmp_path) for name in ("cat", "dog")]
    mine, beside = await cat.ask(), await dog.ask()
    read, saved = generation.version_of_run, list[CheckpointId]()

    async def overtaken(*arguments: Any) -> CheckpointId:
        found = await read(*arguments)
        if not saved:
            saved.append(await cat.publish())
        return found

    monkeypatch.setattr(generation, "version_of_run", overtaken)
    assert await cat.ask() == mine
    assert await cat.at(mine) == (saved[0], 1)
    assert await dog.ask() == beside
    assert await dog.at(beside) == (dog.live.version, 0)
    await database.close()
