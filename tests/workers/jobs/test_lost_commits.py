"""A job whose record the database loses or holds up: its work is done once all the same. Another tenant's job goes on."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import func, make_url, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import Unavailable
from contracts.weight_jobs import JobState, MergeRequest
from engine.model.base import BaseModel
from store.database import Database, after_commit, create_engine
from store.tables import Checkpoint, WeightJob
from tenants import taken_jobs, weight_jobs
from tenants.limits import Counted, hold_count
from tenants.taken_jobs import TakenJob
from testing.commit_proxy import CommitProxy
from testing.held_file import PATIENCE_SECONDS
from tests.workers.jobs import test_runner
from tests.workers.jobs.test_runner import BASE, Shop
from tests.workers.runtimes import make_runtime
from workers.jobs import runner as runner_module
from workers.jobs.job_process import JobProcess
from workers.jobs.work import Made, MergeWork, Work

KEY = "a-key-of-the-tenants"
NAME = "merged-once"


base, process = test_runner.base, test_runner.process
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def shop(base: BaseModel, process: JobProcess, migrated_postgres_url: str, tmp_path: Path) -> AsyncIterator[Shop]:
    """A service whose connections are whole."""
    made, database = Shop(base, process), Database(create_engine(migrated_postgres_url))
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
    shop: Shop, base: BaseModel, migrated_postgres_url: str, tmp_path: Path
) -> None:
    (cats, path), (dogs, other) = await shop.tenant("cats"), await shop.tenant("dogs")
    with losing(migrated_postgres_url, KEY) as (url, proxy):
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
    shop: Shop, base: BaseModel, migrated_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(runner_module, "_RETRY_SECONDS", 0.05)
    (cats, path), (dogs, other) = await shop.tenant("cats"), await shop.tenant("dogs")
    mine, theirs = await shop.ask(cats, path, NAME), await shop.ask(dogs, other, "theirs")
    # The name stands in the transaction that records what was made, the id also in the one that takes the job.
    with losing(migrated_postgres_url, mine if lost == "taken" else NAME) as (url, proxy):
        worker, database = Shop(base, shop.process), Database(create_engine(url))
        worker.runtime = make_runtime(database, tmp_path / "data", shop.clock)
        runner = worker.runner()
        if lost == "taken":
            with pytest.raises(Unavailable):
                await runner.run_all()
        await runner.run_all()
        assert proxy.lost.is_set()
        assert (await shop.job(dogs, theirs)).attempts == 1
        assert (await shop.job(dogs, theirs)).state == JobState.DONE
        if lost == "taken":
            shop.now += 2 * taken_jobs.LEASE
            await runner.run_all()
        await runner.finished()
        await database.close()
    job = await shop.job(cats, mine)
    assert (job.state, job.attempts, job.error_code) == (JobState.DONE, 2 if lost == "taken" else 1, None)
    assert await count(shop, Checkpoint) == 4
    assert len(shop.folders()) == 4, "nothing is left of an attempt"


def counted_merges(monkeypatch: pytest.MonkeyPatch, process: JobProcess) -> Counter[str]:
    """Return how often each adapter is merged from now on."""
    merges: Counter[str] = Counter()
    do = process.do

    async def counted(work: Work, progress: Callable[[int, int], None]) -> Made:
        assert isinstance(work, MergeWork)
        merges[work.adapter.name] += 1
        return await do(work, progress)

    monkeypatch.setattr(process, "do", counted)
    return merges


async def test_a_job_whose_record_waits_for_a_lock_is_kept_and_not_done_again(
    shop: Shop, migrated_postgres_url: str, tmp_path: Path, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement's time runs out while the lock stands, and so does the time of the first lease. Another worker looks on."""
    monkeypatch.setattr("store.database.COMMAND_SECONDS", 3.0)
    for name in ("_RETRY_SECONDS", "_RENEW_SECONDS"):
        monkeypatch.setattr(runner_module, name, 0.05)
    (cats, path), (dogs, other) = await shop.tenant("cats"), await shop.tenant("dogs")
    mine, theirs = await shop.ask(cats, path, NAME), await shop.ask(dogs, other, "theirs")
    impatient, database = Shop(base, shop.process), Database(create_engine(migrated_postgres_url))
    impatient.runtime = make_runtime(database, tmp_path / "data", shop.clock)
    runner, renewed = impatient.runner(), asyncio.Event()
    renew = runner_module.renew_job

    async def noted(transaction: AsyncSession, job: TakenJob, *, done: int, total: int, now: datetime) -> bool:
        is_held = await renew(transaction, job, done=done, total=total, now=now)
        if job.id == mine and now == shop.now:
            after_commit(transaction, renewed.set)
        return is_held

    monkeypatch.setattr(runner_module, "renew_job", noted)
    merges = counted_merges(monkeypatch, shop.process)
    await shop.process.ready()
    async with shop.runtime.database.write() as holder:
        await holder.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        await hold_count(holder, Counted.STORAGE, [cats])
        async with asyncio.timeout(PATIENCE_SECONDS):
            await runner.run_all()
        assert (await shop.job(dogs, theirs)).state == JobState.DONE
        for _ in range(2):
            shop.now += taken_jobs.LEASE * 2 / 3
            renewed.clear()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await renewed.wait()
        await shop.runner().run_all()
        held = await shop.job(cats, mine)
        assert (held.state, held.attempts) == (JobState.RUNNING, 1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await runner.finished()
    await database.close()
    done = await shop.job(cats, mine)
    assert (done.state, done.attempts, done.error_code) == (JobState.DONE, 1, None)
    assert sorted(merges.values()) == [1, 1]
    assert await count(shop, Checkpoint) == len(shop.folders()) == 4


async def is_waiting(shop: Shop) -> bool:
    """Tell whether a change of a job waits for another one's transaction."""
    waits = "wait_event_type = 'Lock' AND query LIKE 'UPDATE weight_jobs%'"
    asked = f"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND {waits}"
    async with shop.runtime.database.read() as session:
        return bool(await session.scalar(text(asked)))


async def test_a_job_that_its_worker_gives_back_while_it_is_cancelled_is_cancelled(shop: Shop) -> None:
    """The cancellation comes while the worker's row is not committed. Another tenant's job stays."""
    (cats, path), (dogs, other) = await shop.tenant("cats"), await shop.tenant("dogs")
    mine = await shop.ask(cats, path, NAME)
    taken = await shop.take()
    assert taken is not None
    theirs = await shop.ask(dogs, other, "theirs")

    async def cancel() -> bool:
        async with shop.runtime.database.write() as transaction:
            return (await weight_jobs.cancel_job(transaction, cats, mine, shop.now))[1]

    async with shop.runtime.database.write() as giving:
        await taken_jobs.give_back(giving, taken)
        cancelling = asyncio.create_task(cancel())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await is_waiting(shop):
                pass
    assert await cancelling
    assert (await shop.job(cats, mine)).state == JobState.CANCELLED
    assert (await shop.job(dogs, theirs)).state == JobState.PENDING
