"""Jobs whose work cannot read a file: other tenants' jobs run in the same round, and none is postponed for ever."""

from collections.abc import Callable

import pytest

from contracts.weight_jobs import JobState
from store import unread_files
from tests.workers.jobs import test_runner
from tests.workers.jobs.test_runner import BASE, Shop
from workers.jobs.job_process import JobProcess, WorkPostponed
from workers.jobs.runner import JobRunner
from workers.jobs.work import Made, MergeWork, Work

base, process, shop = test_runner.base, test_runner.process, test_runner.shop
pytestmark = pytest.mark.asyncio(loop_scope="module")


class PostponingProcess(JobProcess):
    """Work that cannot read the adapter ``unreadable``, and of others writes a folder."""

    def __init__(self, unreadable: str) -> None:
        super().__init__()
        self.asked: list[bool] = []
        """True for each work whose adapter was the unreadable one, in order."""
        self._unreadable = unreadable

    async def ready(self) -> None:
        """Start nothing."""

    async def do(self, work: Work, progress: Callable[[int, int], None]) -> Made:
        assert isinstance(work, MergeWork)
        self.asked.append(work.adapter.name == self._unreadable)
        if self.asked[-1]:
            raise WorkPostponed("unreadable")
        work.directory.mkdir()
        return Made(7)


async def test_a_postponed_job_keeps_no_other_tenants_job_from_running(shop: Shop) -> None:
    (cats, path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    id, theirs = await shop.ask(cats, path, "merged"), await shop.ask(dogs, dogs_path, "theirs")
    process = PostponingProcess((await shop.adapter(cats, path)).name)
    await JobRunner(shop.runtime, {BASE: shop.base}, process).run_all()
    mine, done = await shop.job(cats, id), await shop.job(dogs, theirs)
    assert (mine.state, mine.attempts, done.state) == (JobState.PENDING, 0, JobState.DONE)
    assert process.asked == [True, False], "the postponed job is tried once a round"


async def test_a_job_that_is_postponed_for_long_fails_after_its_attempts(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data folder is there all the time, and another tenant's job that comes later is done."""
    (cats, path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    id, most = await shop.ask(cats, path, "merged"), shop.runtime.settings.max_attempts
    process = PostponingProcess((await shop.adapter(cats, path)).name)
    runner = JobRunner(shop.runtime, {BASE: shop.base}, process)
    for _ in range(most + 1):
        await runner.run_all()
    assert ((await shop.job(cats, id)).state, (await shop.job(cats, id)).attempts) == (JobState.PENDING, 0)
    monkeypatch.setattr(unread_files, "LONGEST_SECONDS", -1.0)
    folder = shop.runtime.data_folder.path("checkpoints")
    away = folder.rename(folder.with_name("away"))
    for _ in range(most + 1):
        await runner.run_all()
    assert ((await shop.job(cats, id)).state, (await shop.job(cats, id)).attempts) == (JobState.PENDING, 0)
    away.rename(folder)
    for _ in range(most):
        assert (await shop.job(cats, id)).state == JobState.PENDING
        await runner.run_all()
    theirs = await shop.ask(dogs, dogs_path, "theirs")
    await runner.run_all()
    failed, done = await shop.job(cats, id), await shop.job(dogs, theirs)
    assert (failed.state, failed.error_code, done.state) == (JobState.FAILED, "poison_operation", JobState.DONE)
