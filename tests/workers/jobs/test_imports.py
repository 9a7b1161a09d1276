"""Imports as jobs: done once whoever dies, and their archive goes with every end of theirs. On both databases."""

import asyncio
import io
import os
import tarfile
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest

from contracts.ids import TenantId
from contracts.paths import Segment, parse_path
from contracts.weight_jobs import ImportRequest, JobState
from engine.model.adapter_folder import CONFIG, WEIGHTS
from store import unread_files
from tenants import taken_jobs, weight_jobs
from tenants.checkpoints import directory_of, find_checkpoint
from tenants.limits import Limits, set_tenant
from tenants.weight_jobs import ARCHIVE, IMPORTS, NewJob, new_job_id, staged_folder
from testing.held_file import PATIENCE_SECONDS, HeldFile
from tests.workers.jobs import test_runner
from tests.workers.jobs.test_runner import BASE, Shop
from workers.housekeeping.folders import FolderRemoval
from workers.jobs import runner as runner_module

base, process, shop = test_runner.base, test_runner.process, test_runner.shop
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def archive_of(shop: Shop, tenant: TenantId, path: str) -> bytes:
    """A tar of a checkpoint's two files of PEFT's."""
    async with shop.runtime.database.read() as session:
        found, _ = await find_checkpoint(session, tenant, parse_path(path), shop.clock)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name in (CONFIG, WEIGHTS):
            tar.add(shop.runtime.data_folder.path(found.directory) / name, name)
    return content.getvalue()


async def stage(shop: Shop, tenant: TenantId, archive: bytes, *, base_model: str = BASE) -> str:
    """Stage an archive and ask for its import; return the job's id."""
    new = NewJob(new_job_id(), base_model)
    folder = shop.runtime.data_folder.path(staged_folder(new.id))
    folder.mkdir(parents=True)
    (folder / ARCHIVE).write_bytes(archive)
    asked = ImportRequest("mine", Segment.WEIGHTS, len(archive), ttl_seconds=60)
    defaults = Limits.of(shop.runtime.settings)
    async with shop.runtime.database.write() as transaction:
        await weight_jobs.add_import(transaction, new, tenant, asked, defaults=defaults, clock=shop.clock)
    return new.id


async def waiting(shop: Shop) -> str:
    """Another tenant's archive, for a base of another worker; return its job."""
    dogs, _ = await shop.tenant("dogs")
    return await stage(shop, dogs, b"theirs", base_model="other")


def staged(shop: Shop) -> list[str]:
    """Jobs whose archives wait."""
    return [folder.name for folder in shop.runtime.data_folder.path(IMPORTS).iterdir()]


async def test_an_import_whose_worker_died_is_done_by_another_once(shop: Shop) -> None:
    """The files that the dead worker had unpacked and half written go."""
    cats, path = await shop.tenant("cats")
    theirs = await waiting(shop)
    id = await stage(shop, cats, await archive_of(shop, cats, path))
    dead = await shop.take()
    assert dead is not None
    folder = shop.runtime.data_folder.path(directory_of(dead.checkpoint))
    folder.with_name(f".{folder.name}.half").mkdir()
    (shop.runtime.data_folder.path(staged_folder(id)) / "unpacked").mkdir()
    shop.now += taken_jobs.LEASE + timedelta(seconds=1)
    await shop.runner().run_all()
    done = await shop.job(cats, id)
    assert (done.state, done.attempts, done.error_message) == (JobState.DONE, 2, None)
    assert done.done_bytes == done.total_bytes > 0
    async with shop.runtime.database.read() as session:
        found, run = await find_checkpoint(session, cats, parse_path(done.result_path or ""), shop.clock)
    assert (found.name, run.base_model, found.expires_at) == ("mine", BASE, shop.now + timedelta(seconds=60))
    written = shop.runtime.data_folder.path(found.directory)
    assert found.size_bytes == sum(file.stat().st_size for file in written.iterdir())
    assert staged(shop) == [theirs]
    assert len(shop.folders()) == 3


async def test_an_archive_goes_with_a_failed_job(shop: Shop) -> None:
    cats, path = await shop.tenant("cats")
    theirs = await waiting(shop)
    damaged = await stage(shop, cats, b"no tar")
    await shop.runner().run_all()
    failed = await shop.job(cats, damaged)
    assert (failed.state, failed.error_code) == (JobState.FAILED, "invalid_request")
    assert "archive cannot be read" in (failed.error_message or "")
    assert staged(shop) == [theirs]
    poison = await stage(shop, cats, await archive_of(shop, cats, path))
    for _ in range(shop.runtime.settings.max_attempts):
        assert await shop.take() is not None
        shop.now += taken_jobs.LEASE + timedelta(seconds=1)
    await shop.runner().run_all()
    assert (await shop.job(cats, poison)).error_code == "poison_operation"
    assert staged(shop) == [theirs]


async def test_an_import_beyond_the_tenants_storage_writes_nothing(shop: Shop) -> None:
    """The limit was lowered while the archive waited."""
    cats, path = await shop.tenant("cats")
    theirs = await waiting(shop)
    archive = await archive_of(shop, cats, path)
    id = await stage(shop, cats, archive)
    lowered = shop.runtime.settings.model_copy(update={"limit_stored_bytes": 1000})
    shop.runtime = replace(shop.runtime, settings=lowered)
    await shop.runner().run_all()
    assert (await shop.job(cats, id)).error_code == "storage_full"
    assert staged(shop) == [theirs]
    assert len(shop.folders()) == 2


async def test_an_import_of_a_larger_rank_than_the_tenant_makes_fails_and_anothers_is_done(shop: Shop) -> None:
    jobs = []
    for name in ("cats", "dogs"):
        tenant, path = await shop.tenant(name)
        jobs.append((tenant, await stage(shop, tenant, await archive_of(shop, tenant, path))))
    async with shop.runtime.database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"max_rank": 1})
    await shop.runner().run_all()
    bounded, free = [await shop.job(*one) for one in jobs]
    assert (bounded.error_code, free.state) == ("invalid_request", JobState.DONE)
    assert "r must be 1 to 1" in str(bounded.error_message)


async def test_an_import_in_hand_ends_when_it_is_cancelled(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    cats, path = await shop.tenant("cats")
    theirs = await waiting(shop)
    id = await stage(shop, cats, await archive_of(shop, cats, path))
    archive = HeldFile(shop.runtime.data_folder.path(staged_folder(id)) / ARCHIVE)
    monkeypatch.setattr(runner_module, "_RENEW_SECONDS", 0.02)
    running = asyncio.create_task(shop.runner().run_all())
    await asyncio.to_thread(archive.reached)
    working = shop.process.pid
    assert working is not None
    async with shop.runtime.database.write() as transaction:
        await weight_jobs.cancel_job(transaction, cats, id, shop.now)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await running
    assert not psutil.pid_exists(working)
    assert (await shop.job(cats, id)).state == JobState.CANCELLED
    assert staged(shop) == [theirs]
    assert len(shop.folders()) == 2


async def test_an_archive_without_an_unfinished_job_is_an_orphan(shop: Shop) -> None:
    """The archive's request died before the job was recorded, or its worker between the job's end and the removal."""
    cats, _ = await shop.tenant("cats")
    theirs = await waiting(shop)
    ended = await stage(shop, cats, b"x")
    async with shop.runtime.database.write() as transaction:
        await weight_jobs.cancel_job(transaction, cats, ended, shop.now)
    shop.runtime.data_folder.path(staged_folder(new_job_id())).mkdir()
    removal, removed = FolderRemoval(shop.runtime), 0
    place: str | None = ""
    assert (await removal.remove_orphans(after=f"{IMPORTS}/")).handled == 0, "they are young"
    for folder in shop.runtime.data_folder.folders(IMPORTS):
        os.utime(shop.runtime.data_folder.path(folder), (0, 0))
    while place is not None:
        batch = await removal.remove_orphans(after=place)
        place, removed = batch.next, removed + batch.handled
    assert removed == 2
    assert staged(shop) == [theirs]
    assert len(shop.folders()) == 2


@pytest.mark.parametrize("folder", [".", IMPORTS])
async def test_an_import_whose_folder_is_away_for_a_while_is_postponed(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """The whole data folder is away, or the folder of archives. No attempt counts, and another tenant's merge is done."""
    monkeypatch.setattr(unread_files, "LONGEST_SECONDS", -1.0 if folder == "." else 600.0)
    (cats, path), (dogs, dogs_path) = await shop.tenant("cats"), await shop.tenant("dogs")
    id = await stage(shop, cats, await archive_of(shop, cats, path))
    present = shop.runtime.data_folder.path(folder)
    away = present.rename(present.with_name("away"))
    runner = shop.runner()
    for _ in range(shop.runtime.settings.max_attempts + 1):
        await runner.run_all()
        waiting = await shop.job(cats, id)
        assert (waiting.state, waiting.attempts, waiting.error_message) == (JobState.PENDING, 0, None)
    if folder == IMPORTS:
        theirs = await shop.ask(dogs, dogs_path, "theirs")
        await runner.run_all()
        assert (await shop.job(dogs, theirs)).state == JobState.DONE
    away.rename(present)
    theirs = await shop.ask(dogs, dogs_path, "again")
    await runner.run_all()
    done, other = await shop.job(cats, id), await shop.job(dogs, theirs)
    assert (done.state, done.attempts, other.state) == (JobState.DONE, 1, JobState.DONE)
    assert staged(shop) == []


async def test_an_import_whose_archive_is_gone_fails_and_anothers_is_done(shop: Shop) -> None:
    jobs = []
    for name in ("cats", "dogs"):
        tenant, path = await shop.tenant(name)
        jobs.append((tenant, await stage(shop, tenant, await archive_of(shop, tenant, path))))
    shop.runtime.data_folder.remove(staged_folder(jobs[0][1]))
    await shop.runner().run_all()
    gone, done = [await shop.job(*one) for one in jobs]
    assert (gone.state, gone.error_code, done.state) == (JobState.FAILED, "invalid_request", JobState.DONE)
    assert "send it again" in str(gone.error_message)
