"""Jobs on weights: taken in turns, done once whoever dies, ended when their tenant says so. On both databases."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import NoReturn

import psutil
import pytest
import pytest_asyncio
import torch
from sqlalchemy import update

from contracts.base_model import read_base_model_facts
from contracts.errors import NotFound, TooManyOperations, Unavailable
from contracts.ids import RunId, TenantId
from contracts.operations import LoraSettings
from contracts.paths import CheckpointPath, Segment, parse_path
from contracts.weight_jobs import JobState, MergeRequest
from engine.model.adapter_folder import write_adapter_files
from engine.model.base import BaseModel
from engine.model.lora import LoraWeights
from ledger.runtime import Runtime
from store.database import Database, create_engine
from store.tables import Session, WeightJob
from tenants import taken_jobs, weight_jobs
from tenants.checkpoints import (
    NewCheckpoint,
    directory_of,
    find_checkpoint,
    new_checkpoint_id,
    record_checkpoint,
)
from tenants.project_limits import set_project_limits
from tenants.projects import create_project
from tenants.runs import NewRun
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.held_file import PATIENCE_SECONDS, HeldFile
from testing.runs import create_run
from tests.workers.runtimes import make_runtime
from workers.jobs import attempt
from workers.jobs import runner as runner_module
from workers.jobs.job_process import JobProcess
from workers.jobs.runner import JobRunner
from workers.jobs.work import Made, Work

BASE = "weft/tiny"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def base(tiny_model_dir: Path) -> BaseModel:
    """The tiny base."""
    return BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process() -> AsyncIterator[JobProcess]:
    """The process of the jobs' work: to start one takes long."""
    made = JobProcess(idle=3600.0)
    yield made
    await made.close()


@dataclass
class Shop:
    """A service's database and folder, tenants with a checkpoint each, and a clock that the test moves."""

    base: BaseModel
    process: JobProcess
    now: datetime = field(default_factory=lambda: datetime(2026, 1, 1, tzinfo=UTC))
    runtime: Runtime = field(init=False)

    def clock(self) -> datetime:
        return self.now

    def runner(self) -> JobRunner:
        """A worker's part for jobs."""
        return JobRunner(self.runtime, {BASE: self.base}, self.process)

    async def tenant(self, name: str) -> tuple[TenantId, str]:
        """A tenant, and the path of its checkpoint."""
        settings, id = LoraSettings(rank=2, seed=1), new_checkpoint_id()
        layout = self.base.layout(settings)
        folder = self.runtime.data_folder.path(directory_of(id))
        folder.mkdir(parents=True)
        write_adapter_files(folder, self.base, LoraWeights(settings, layout, torch.full((layout.size,), 0.01)))
        async with self.runtime.database.write() as transaction:
            tenant = await create_tenant(transaction, name=name, clock=self.clock)
            session = await create_session(transaction, tenant, NewSession([], None, "raw", None, None), self.clock)
            run = await create_run(transaction, tenant, NewRun(session, 0, BASE, settings, None), self.clock)
            new = NewCheckpoint(id, RunId(run), Segment.WEIGHTS, "kept", 7, None, True, None)
            await record_checkpoint(transaction, tenant, new, self.clock)
        return tenant, f"tinker://{run}/weights/kept"

    async def ask(self, tenant: TenantId, path: str, name: str, dtype: str | None = None) -> str:
        """Ask for a merge; return the job's id."""
        async with self.runtime.database.write() as transaction:
            self.now += timedelta(milliseconds=1)
            return (
                await weight_jobs.add_merge(transaction, tenant, BASE, MergeRequest(path, name, dtype=dtype), self.now)
            ).id

    async def job(self, tenant: TenantId, id: str) -> WeightJob:
        """The job's row."""
        async with self.runtime.database.read() as session:
            return await weight_jobs.get_job(session, tenant, id)

    async def take(self) -> taken_jobs.TakenJob | None:
        """Take a job as a worker that then does nothing."""
        async with self.runtime.database.write() as transaction:
            self.now += timedelta(milliseconds=1)
            return await taken_jobs.take_job(transaction, [BASE], self.now)

    async def adapter(self, tenant: TenantId, path: str) -> Path:
        """The folder of a checkpoint."""
        async with self.runtime.database.read() as session:
            found, _ = await find_checkpoint(session, tenant, parse_path(path), self.clock)
        return self.runtime.data_folder.path(found.directory)

    def folders(self) -> list[str]:
        """Names of the folders of checkpoints, half-written ones included."""
        return [path.name for path in self.runtime.data_folder.path("checkpoints").iterdir()]


@pytest_asyncio.fixture(loop_scope="module")
async def shop(base: BaseModel, process: JobProcess, database_url: str, tmp_path: Path) -> AsyncIterator[Shop]:
    """A service without workers."""
    made = Shop(base, process)
    database = Database(create_engine(database_url))
    made.runtime = make_runtime(database, tmp_path / "data", made.clock)
    yield made
    await database.close()


async def test_tenants_take_turns_and_see_their_own_jobs_alone(shop: Shop) -> None:
    (cats, cats_path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    for name in "abc":
        await shop.ask(cats, cats_path, name)
    theirs = await shop.ask(dogs, dogs_path, "d")
    taken = [await shop.take() for _ in range(4)]
    assert [job.tenant for job in taken if job is not None] == [cats, dogs, cats, cats]
    assert await shop.take() is None
    with pytest.raises(NotFound):
        await shop.job(cats, theirs)
    async with shop.runtime.database.write() as transaction:
        with pytest.raises(NotFound):
            await weight_jobs.cancel_job(transaction, cats, theirs, shop.now)
    assert await shop.ask(dogs, dogs_path, "d") == theirs, "the same under way is the same job"
    for number in range(weight_jobs.MOST_UNFINISHED - 1):
        await shop.ask(dogs, dogs_path, f"more{number}")
    with pytest.raises(TooManyOperations):
        await shop.ask(dogs, dogs_path, "last")
    await shop.ask(cats, cats_path, "still")


async def test_a_job_whose_worker_died_ends_when_it_is_cancelled(shop: Shop) -> None:
    """A cancel waits for no worker: none may serve the base any more. Another tenant's job is done by the next one."""
    (cats, cats_path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    mine, theirs = await shop.ask(cats, cats_path, "a"), await shop.ask(dogs, dogs_path, "b")
    dead = [await shop.take() for _ in range(2)]

    async def cancel() -> bool:
        async with shop.runtime.database.write() as transaction:
            return (await weight_jobs.cancel_job(transaction, cats, mine, shop.now))[1]

    shop.now += taken_jobs.LEASE + timedelta(seconds=1)
    assert await cancel()
    assert (await shop.job(cats, mine)).state == JobState.CANCELLED
    assert not await cancel()
    await shop.runner().run_all()
    assert (await shop.job(dogs, theirs)).state == JobState.DONE
    async with shop.runtime.database.write() as transaction:
        for job in dead:
            assert job is not None
            assert not await taken_jobs.renew_job(transaction, job, done=1, total=1, now=shop.now)


async def test_a_job_whose_worker_died_is_done_by_another_once(shop: Shop) -> None:
    """The dead worker comes back to life at the end, and may write nothing. Its half-written folder goes."""
    cats, path = await shop.tenant("cats")
    id = await shop.ask(cats, path, "merged")
    dead = await shop.take()
    assert dead is not None
    folder = shop.runtime.data_folder.path(directory_of(dead.checkpoint))
    folder.with_name(f".{folder.name}.half").mkdir()
    await shop.runner().run_all()
    assert (await shop.job(cats, id)).state == JobState.RUNNING, "the lease stands"
    shop.now += taken_jobs.LEASE + timedelta(seconds=1)
    await shop.runner().run_all()
    done = await shop.job(cats, id)
    assert (done.state, done.attempts, done.done_bytes) == (JobState.DONE, 2, done.total_bytes)
    run = path.removeprefix("tinker://").partition("/")[0]
    target = CheckpointPath(run, Segment.EXTERNAL_WEIGHTS, "merged")
    assert done.result_path == str(target)
    async with shop.runtime.database.write() as transaction:
        found, _ = await find_checkpoint(transaction, cats, target, shop.clock)
        assert not await taken_jobs.renew_job(transaction, dead, done=1, total=2, now=shop.now)
        assert not await taken_jobs.finish_job(transaction, dead, "x", state=JobState.DONE, now=shop.now)
    written = shop.runtime.data_folder.path(found.directory)
    assert found.size_bytes == sum(file.stat().st_size for file in written.iterdir())
    assert len(shop.folders()) == 2


async def test_a_job_that_ends_its_workers_is_tried_no_more(shop: Shop) -> None:
    cats, path = await shop.tenant("cats")
    id = await shop.ask(cats, path, "merged")
    for _ in range(shop.runtime.settings.max_attempts):
        assert await shop.take() is not None
        shop.now += taken_jobs.LEASE + timedelta(seconds=1)
    await shop.runner().run_all()
    assert ((await shop.job(cats, id)).state, (await shop.job(cats, id)).error_code) == (
        JobState.FAILED,
        "poison_operation",
    )


async def test_a_job_that_fails_in_an_unforeseen_way_is_told_so_at_once(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of the base cannot be read. Another tenant's job behind it is done by the same worker."""
    (cats, path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    id = await shop.ask(cats, path, "merged")
    broken = shutil.copytree(shop.base.facts.path, tmp_path / "broken")
    (broken / "LICENSE").symlink_to("/proc/self/mem")
    with monkeypatch.context() as patch:
        patch.setattr(shop.base, "facts", replace(shop.base.facts, path=broken))
        await shop.runner().run_all()
    worker = shop.process.pid
    other = await shop.ask(dogs, dogs_path, "theirs")
    await shop.runner().run_all()
    failed, done = await shop.job(cats, id), await shop.job(dogs, other)
    assert (failed.state, failed.error_code, failed.attempts) == (JobState.FAILED, "engine_failure", 1)
    assert id in (failed.error_message or "")
    assert "in write_atomically" in caplog.text, "the log has the cause"
    assert (done.state, shop.process.pid) == (JobState.DONE, worker)
    assert len(shop.folders()) == 3


async def test_a_job_without_progress_gives_its_lease_up_and_others_go_on(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's disk does not answer, and the process that waits for it ends. Another tenant's job goes on."""
    (cats, path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    ahead = [0.0]
    for module in (runner_module, attempt):
        monkeypatch.setattr(module, "monotonic", lambda: monotonic() + ahead[0])
    monkeypatch.setattr(runner_module, "_RENEW_SECONDS", 0.05)
    config = HeldFile(await shop.adapter(cats, path) / "adapter_config.json")
    id, other = await shop.ask(cats, path, "merged"), await shop.ask(dogs, dogs_path, "theirs")
    running = asyncio.create_task(shop.runner().run_all())
    await asyncio.to_thread(config.reached)
    stalled = shop.process.pid
    assert stalled is not None
    # Only the attempt that has begun stands still for so long.
    ahead[0] = 2 * shop.runtime.settings.stall_limit.total_seconds()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await running
    held, done = await shop.job(cats, id), await shop.job(dogs, other)
    assert (held.state, held.attempts, done.state) == (JobState.RUNNING, 1, JobState.DONE)
    assert not psutil.pid_exists(stalled)
    config.mend()
    shop.now += taken_jobs.LEASE + timedelta(seconds=1)
    await shop.runner().run_all()
    assert ((await shop.job(cats, id)).state, (await shop.job(cats, id)).attempts) == (JobState.DONE, 2)
    assert len(shop.folders()) == 4


async def test_a_job_whose_process_is_killed_is_tried_again_and_done(shop: Shop) -> None:
    """The kernel does so for lack of memory. Another tenant's job goes on at once, in another process."""
    (cats, path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    config = HeldFile(await shop.adapter(cats, path) / "adapter_config.json")
    id, other = await shop.ask(cats, path, "merged"), await shop.ask(dogs, dogs_path, "theirs")
    running = asyncio.create_task(shop.runner().run_all())
    await asyncio.to_thread(config.reached)
    (shop.runtime.data_folder.path("checkpoints") / f".{(await shop.job(cats, id)).checkpoint_id}.half").mkdir()
    killed = shop.process.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await running
    left, done = await shop.job(cats, id), await shop.job(dogs, other)
    assert (left.state, left.attempts) == (JobState.RUNNING, 1)
    assert (done.state, done.attempts) == (JobState.DONE, 1)
    config.mend()
    shop.now += taken_jobs.LEASE + timedelta(seconds=1)
    await shop.runner().run_all()
    again = await shop.job(cats, id)
    assert (again.state, again.attempts, again.error_code) == (JobState.DONE, 2, None)
    assert len(shop.folders()) == 4, "nothing is left of the attempt that was killed"


@pytest.mark.parametrize("how", ["cancelled", "stopped"])
async def test_a_job_in_hand_ends_or_goes_back(shop: Shop, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The process is in the middle of the merge, and ends; another tenant's job waits behind it."""
    (cats, path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    config = HeldFile(await shop.adapter(cats, path) / "adapter_config.json")
    id, other = await shop.ask(cats, path, "merged"), await shop.ask(dogs, dogs_path, "theirs")
    monkeypatch.setattr(runner_module, "_RENEW_SECONDS", 0.02)
    worker = shop.runner()
    running = asyncio.create_task(worker.run_all())
    await asyncio.to_thread(config.reached)
    working = shop.process.pid
    assert working is not None
    (shop.runtime.data_folder.path("checkpoints") / f".{(await shop.job(cats, id)).checkpoint_id}.half").mkdir()
    if how == "cancelled":
        async with shop.runtime.database.write() as transaction:
            job, _ = await weight_jobs.cancel_job(transaction, cats, id, shop.now)
            assert job.state == JobState.RUNNING
    else:
        worker.stop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await running
    assert not psutil.pid_exists(working)
    config.mend()
    mine, theirs = await shop.job(cats, id), await shop.job(dogs, other)
    if how == "cancelled":
        assert (mine.state, mine.error_code, theirs.state) == (JobState.CANCELLED, "cancelled", JobState.DONE)
        assert len(shop.folders()) == 3
    else:
        assert (mine.state, mine.attempts, theirs.state) == (JobState.PENDING, 0, JobState.PENDING)
        assert len(shop.folders()) == 2


async def test_an_outage_at_a_jobs_begin_counts_as_no_attempt(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database is away again and again once the job is taken. Another tenant's job waits behind it."""
    (cats, path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    id = await shop.ask(cats, path, "merged")

    async def away(*_: object) -> NoReturn:
        raise Unavailable("away")

    with monkeypatch.context() as outage:
        outage.setattr(runner_module, "find_checkpoint", away)
        for _ in range(shop.runtime.settings.max_attempts + 1):
            with pytest.raises(Unavailable):
                await shop.runner().run_all()
            assert ((await shop.job(cats, id)).state, (await shop.job(cats, id)).attempts) == (JobState.PENDING, 0)
    other = await shop.ask(dogs, dogs_path, "theirs")
    await shop.runner().run_all()
    for tenant, job in ((cats, id), (dogs, other)):
        done = await shop.job(tenant, job)
        assert (done.state, done.attempts) == (JobState.DONE, 1)


async def test_an_outage_of_the_data_folder_counts_as_no_attempt(shop: Shop) -> None:
    """A shared disk is away once the job is taken. Another tenant's job waits behind it."""
    (cats, path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    jobs = {cats: await shop.ask(cats, path, "merged"), dogs: await shop.ask(dogs, dogs_path, "theirs")}
    folder = shop.runtime.data_folder.path("checkpoints")
    away = folder.rename(folder.with_name("away"))
    for _ in range(shop.runtime.settings.max_attempts + 1):
        await shop.runner().run_all()
    away.rename(folder)
    await shop.runner().run_all()
    for tenant, job in jobs.items():
        done = await shop.job(tenant, job)
        assert (done.state, done.attempts) == (JobState.DONE, 1)


class HeldProcess(JobProcess):
    """Work that writes nothing but a folder, and ends when the test says so."""

    def __init__(self, go_on: asyncio.Event) -> None:
        super().__init__()
        self.begun, self._go_on = asyncio.Event(), go_on

    async def ready(self) -> None:
        """Start nothing."""

    async def do(self, work: Work, progress: Callable[[int, int], None]) -> Made:
        self.begun.set()
        await self._go_on.wait()
        work.directory.mkdir()
        return Made(7)


async def test_of_two_merges_of_one_name_the_later_is_told_to_take_another(shop: Shop) -> None:
    """Both have found the name free and work at the same time. Another run of the same name is no matter."""
    (cats, path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    mine = [await shop.ask(cats, path, "merged"), await shop.ask(cats, path, "merged", dtype="float32")]
    theirs = await shop.ask(dogs, dogs_path, "merged")
    go_on = asyncio.Event()
    processes = [HeldProcess(go_on) for _ in range(3)]
    runners = [JobRunner(shop.runtime, {BASE: shop.base}, process) for process in processes]
    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as working:
        for runner, process in zip(runners, processes, strict=True):
            working.create_task(runner.run_all())
            await process.begun.wait()
        go_on.set()
    first, second = sorted([await shop.job(cats, id) for id in mine], key=lambda job: job.state)
    assert (first.state, second.state, second.error_code) == (JobState.DONE, JobState.FAILED, "invalid_request")
    assert "choose another name" in (second.error_message or "")
    assert (await shop.adapter(cats, first.result_path or "")).name == first.checkpoint_id
    assert (await shop.job(dogs, theirs)).state == JobState.DONE
    assert second.checkpoint_id not in shop.folders()
    assert len(shop.folders()) == 4


async def test_a_merge_beyond_the_tenants_storage_writes_nothing(shop: Shop) -> None:
    shop.runtime = replace(shop.runtime, settings=shop.runtime.settings.model_copy(update={"limit_stored_bytes": 1000}))
    cats, path = await shop.tenant("cats")
    id = await shop.ask(cats, path, "merged")
    await shop.runner().run_all()
    found = await shop.job(cats, id)
    assert (found.state, found.error_code) == (JobState.FAILED, "invalid_request")
    assert "storage has room for 993" in (found.error_message or "")
    assert len(shop.folders()) == 1


async def test_a_merge_beyond_its_projects_storage_writes_nothing_and_anothers_is_done(shop: Shop) -> None:
    (cats, path), (dogs, theirs) = await shop.tenant("cats"), await shop.tenant("dogs")
    async with shop.runtime.database.write() as transaction:
        project = await create_project(transaction, cats, "small", shop.clock)
        await set_project_limits(transaction, cats, project.id, {"stored_bytes": 1000}, shop.clock)
        session_id = parse_path(path).run_id.partition(":")[0]
        await transaction.execute(update(Session).where(Session.id == session_id).values(project=project.id))
    ids = [await shop.ask(cats, path, "merged"), await shop.ask(dogs, theirs, "merged")]
    await shop.runner().run_all()
    found = await shop.job(cats, ids[0])
    assert (found.state, found.error_code) == (JobState.FAILED, "invalid_request")
    assert "storage has room for 993" in (found.error_message or "")
    assert (await shop.job(dogs, ids[1])).state == JobState.DONE


async def test_a_merge_of_a_checkpoint_that_is_gone_fails(shop: Shop) -> None:
    cats, path = await shop.tenant("cats")
    id = await shop.ask(cats, path.replace("kept", "gone"), "merged")
    await shop.runner().run_all()
    assert (await shop.job(cats, id)).error_code == "not_found"
