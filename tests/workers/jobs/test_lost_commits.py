"""A COMMIT whose answer is lost: a job is asked for once, taken again, and recorded once. Another tenant's job goes on."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import func, make_url, select

from contracts.base_model import read_base_model_facts
from contracts.errors import Unavailable
from contracts.weight_jobs import JobState, MergeRequest
from engine.model.base import BaseModel
from migrations.upgrade import upgrade
from store.database import Database, create_engine
from store.tables import Checkpoint, WeightJob
from tenants import weight_jobs
from testing.commit_proxy import CommitProxy
from tests.workers.jobs.test_runner import BASE, Shop
from tests.workers.runtimes import make_runtime

KEY = "a-key-of-the-tenants"
NAME = "merged-once"


@pytest.fixture(scope="module")
def base(tiny_model_dir: Path) -> BaseModel:
    """The tiny base."""
    return BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))


@pytest_asyncio.fixture
async def shop(base: BaseModel, postgres_url: str, tmp_path: Path) -> AsyncIterator[Shop]:
    """A service whose connections are whole."""
    await asyncio.to_thread(upgrade, postgres_url)
    made, database = Shop(base), Database(create_engine(postgres_url))
    made.runtime = make_runtime(database, tmp_path / "data", made.clock)
    yield made
    await database.close()


@contextmanager
def losing(url: str, marker: str) -> Iterator[tuple[str, CommitProxy]]:
    """Yield an address behind which the next COMMIT of a transaction that names ``marker`` is not answered."""
    server = make_url(url)
    with CommitProxy(server.host or "", server.port or 5432, marker) as proxy:
        yield server.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False), proxy


async def count(shop: Shop, table: type[Checkpoint] | type[WeightJob]) -> int:
    """Rows of the table."""
    async with shop.runtime.database.read() as session:
        return await session.scalar(select(func.count()).select_from(table)) or 0


async def test_a_request_that_was_recorded_without_an_answer_makes_one_job(
    shop: Shop, base: BaseModel, postgres_url: str, tmp_path: Path
) -> None:
    (cats, path), (dogs, other) = await shop.tenant("cats"), await shop.tenant("dogs")
    with losing(postgres_url, KEY) as (url, proxy):
        database = Database(create_engine(url))

        async def ask() -> str:
            async with database.write() as transaction:
                merge = MergeRequest(path, NAME)
                return (await weight_jobs.add_merge(transaction, cats, BASE, merge, shop.now, key=KEY)).id

        with pytest.raises(Unavailable):
            await ask()
        assert proxy.lost.is_set()
        found = await ask()
        await database.close()
    assert await count(shop, WeightJob) == 1
    assert (await shop.job(cats, found)).state == JobState.PENDING
    assert await shop.ask(dogs, other, NAME) != found


@pytest.mark.parametrize("lost", ["taken", "recorded"])
async def test_a_job_whose_commit_was_not_answered_is_done_once(
    shop: Shop, base: BaseModel, postgres_url: str, tmp_path: Path, lost: str
) -> None:
    (cats, path), (dogs, other) = await shop.tenant("cats"), await shop.tenant("dogs")
    mine, theirs = await shop.ask(cats, path, NAME), await shop.ask(dogs, other, "theirs")
    # The name stands in the transaction that records what was made, the id also in the one that takes the job.
    with losing(postgres_url, mine if lost == "taken" else NAME) as (url, proxy):
        worker, database = Shop(base), Database(create_engine(url))
        worker.runtime = make_runtime(database, tmp_path / "data", shop.clock)
        runner = worker.runner()
        with pytest.raises(Unavailable):
            await runner.run_all()
        assert proxy.lost.is_set()
        await runner.run_all()
        assert (await shop.job(dogs, theirs)).attempts == 1
        assert (await shop.job(dogs, theirs)).state == JobState.DONE
        shop.now += 2 * weight_jobs.LEASE
        await runner.run_all()
        await database.close()
    job = await shop.job(cats, mine)
    assert (job.state, job.attempts, job.error_code) == (JobState.DONE, 2 if lost == "taken" else 1, None)
    assert await count(shop, Checkpoint) == 4
    assert len(shop.folders()) == 4, "nothing is left of an attempt"
