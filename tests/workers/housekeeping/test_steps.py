"""Housekeeping deletes what has expired or has no owner, and keeps what is in use."""

import os
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import select, update

from contracts.ids import CheckpointId, RequestId
from contracts.losses import LossName
from ledger.work_in_hand import WorkInHand, keep_record
from store.data_folder import DataFolder
from store.tables import ProcessKind, Run, RunState, Session, VersionCommand
from tenants.checkpoints import directory_of
from tenants.run_directives import RunDirective, direct_run, standing_directive
from tenants.run_history import RunEventKind, note_run_events, run_history
from tenants.trainers import RECORDS
from tests.engine.training.conftest import make_batch
from tests.store.flushed_first import watch
from tests.workers.housekeeping.conftest import House
from workers.housekeeping.folders import FolderRemoval
from workers.housekeeping.schedule import StepName
from workers.housekeeping.step import Batch
from workers.leases.processes import new_identity, renew


async def test_a_version_command_whose_sender_died_goes(house: House) -> None:
    async with house.database.write() as transaction:
        for command, age in (("old", timedelta(hours=2)), ("new", timedelta(minutes=1))):
            made = house.now - age
            transaction.add(VersionCommand(id=command, process_id="pool", kind="prepare", version="v", created_at=made))
    await house.sweep()
    async with house.database.read() as session:
        assert list(await session.scalars(select(VersionCommand.id))) == ["new"]


async def test_replicas_forget_a_version_before_its_folder_goes(house: House) -> None:
    """A vLLM server dies of an adapter that it lists and whose folder is gone."""
    tenant, _, run = await house.run("first")
    going, kept = await house.checkpoint(tenant, run, "short", ttl=60), await house.checkpoint(tenant, run, "kept")
    withdrawn: list[tuple[CheckpointId, bool]] = []

    async def prepare(*_: object) -> None: ...

    async def withdraw(version: CheckpointId) -> None:
        withdrawn.append((version, house.folder.path(directory_of(version)).exists()))

    house.publication.register("base", prepare, withdraw)
    house.now += timedelta(seconds=61)
    await house.sweep()
    await house.empty_trash()
    assert withdrawn == [(going, True)]
    assert not house.folder.path(directory_of(going)).exists()
    assert house.folder.path(directory_of(kept)).exists()


async def test_expired_checkpoint_goes_with_its_files(house: House) -> None:
    tenant, _, run = await house.run("first")
    other, _, other_run = await house.run("second")
    await house.checkpoint(tenant, run, "short", ttl=60)
    kept = {await house.checkpoint(tenant, run, "kept"), await house.checkpoint(other, other_run, "theirs", ttl=600)}
    house.now += timedelta(seconds=61)
    await house.sweep()
    await house.empty_trash()
    assert await house.checkpoints() == kept


async def test_nameless_version_stays_while_a_sampler_uses_it(house: House) -> None:
    tenant, session, run = await house.run("first")
    used = await house.checkpoint(tenant, run, "used", listed=False)
    await house.checkpoint(tenant, run, "replaced", listed=False)
    await house.sampler(tenant, session, 0, used, live=run)
    async with house.database.write() as transaction:
        await transaction.execute(update(Session).values(last_seen_at=house.now + timedelta(days=1)))
    house.now += timedelta(hours=2)
    await house.sweep()
    await house.empty_trash()
    assert await house.checkpoints() == {used}


async def test_silent_session_ends_and_a_training_one_goes_on(house: House) -> None:
    _, silent, _ = await house.run("first")
    _, training, run = await house.run("second")
    await house.pass_time(timedelta(hours=2))
    async with house.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == run).values(last_request_at=house.now))
    await house.sweep()
    async with house.database.read() as session:
        rows = (await session.execute(select(Session.id, Session.end_reason))).all()
        ended = {row.id: row.end_reason for row in rows}
    assert ended == {silent: "timed_out", training: None}


async def test_a_folder_is_old_by_its_file_systems_clock_and_not_by_the_hosts(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose clock is two days ahead removes nothing that is being written; what is old goes."""
    begun, left, day = "checkpoints/.cats.begun", "checkpoints/.dogs.left", 86400
    for name in (begun, left):
        house.folder.path(name).mkdir(parents=True)
    dated = house.folder.now("checkpoints")
    assert abs(dated - house.folder.path(left).stat().st_mtime) < 60
    monkeypatch.setattr(DataFolder, "now", lambda *_: dated - 2 * day)
    os.utime(house.folder.path(begun), (0, dated - 2 * day))
    os.utime(house.folder.path(left), (0, dated - 4 * day))
    assert (await FolderRemoval(house.runtime).remove_orphans()).handled == 1
    assert (house.folder.path(begun).exists(), house.folder.path(left).exists()) == (True, False)


async def test_orphans_go_in_batches_that_begin_where_the_last_one_ended(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.housekeeping.folders._ASKED_AT_ONCE", 4)
    monkeypatch.setattr("workers.housekeeping.folders._LOOKED_AT", 8)
    tenant, _, run = await house.run("first")
    kept = {await house.checkpoint(tenant, run, f"kept{number}") for number in range(5)}
    orphans = [f"checkpoints/{number}" for number in range(30)] + [f"snapshots/{number}" for number in range(10)]
    orphans += ["checkpoints/.half.written"]
    for orphan in orphans:
        house.folder.path(orphan).mkdir(parents=True)
    for folder in [*orphans, *(directory_of(checkpoint) for checkpoint in kept)]:
        os.utime(house.folder.path(folder), (0, 0))
    young = "snapshots/young"
    house.folder.path(young).mkdir()
    step, place, batches = FolderRemoval(house.runtime), "", list[Batch]()
    while place is not None:
        batches.append(await step.remove_orphans(after=place, most=6))
        place = batches[-1].next
    assert sum(batch.handled for batch in batches) == 41
    assert max(batch.handled for batch in batches) <= 6 + 4
    assert await house.checkpoints() == kept
    assert house.folder.folders("snapshots") == [young]
    for orphan in ("checkpoints/orphan", "snapshots/orphan"):
        house.folder.path(orphan).mkdir()
        os.utime(house.folder.path(orphan), (0, 0))
    record = await house.keeping.run_step(StepName.REMOVE_ORPHANS)
    assert (record.handled, record.position) == (2, None)


async def test_a_power_cut_takes_back_no_deletion_whose_files_are_gone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's newest commits are not on the disk yet: files of a checkpoint, of a run and of a payload wait for that."""
    tenant, _, run = await house.run("first")
    kept = await house.checkpoint(tenant, run, "kept")
    gone = await house.checkpoint(tenant, run, "gone", ttl=60)
    _, _, ended = await house.run("second")
    snapshot, payload = f"snapshots/{ended}", str(uuid4())
    house.folder.path(snapshot).mkdir(parents=True)
    await house.runtime.ledger.payloads.store(
        tenant, RequestId(payload), make_batch(1, LossName.CROSS_ENTROPY, (40_000,))
    )
    os.utime(house.folder.path(f"payloads/{payload[:2]}/{payload}"), (0, 0))
    async with house.database.write() as transaction:
        values = {"state": RunState.UNLOADED, "snapshot_dir": snapshot, "snapshot_bytes": 5}
        await transaction.execute(update(Run).where(Run.id == ended).values(values))
    watched = watch(house.database, monkeypatch)
    house.now += timedelta(seconds=61)
    await house.sweep()
    await house.empty_trash()
    assert set(watched.removed) == {directory_of(gone), snapshot, payload}
    # The trash's row was written with the deletion of the checkpoint's.
    assert gone.encode() in watched.removed[directory_of(gone)]
    assert all(watched.removed.values())
    assert await house.checkpoints() == {kept}


async def test_loop_sweeps_and_stops(house: House) -> None:
    house.keeping.stop()
    await house.keeping.run()


async def test_a_runs_old_events_and_directives_that_nobody_carried_out_go(house: House) -> None:
    _, _, run = await house.run("first")
    for _ in range(2):
        async with house.database.write() as transaction:
            await note_run_events(transaction, [run], RunEventKind.CLAIMED, trainer="t", now=house.now)
            await direct_run(transaction, run, RunDirective.EVICT, now=house.now)
        await house.sweep()
        house.now += timedelta(days=20)
    await house.sweep()
    async with house.database.read() as session:
        assert [event.at for event in await run_history(session, run)] == [house.now - timedelta(days=20)]
        assert await standing_directive(session, run) is None


async def test_a_dead_trainers_record_goes_a_day_after_its_death(house: House) -> None:
    """A living trainer's record stays, however old its folder is: only the file in it changes."""
    living = new_identity(ProcessKind.TRAINER, "test/tiny")
    async with house.database.write() as transaction:
        await renew(transaction, living, lease=timedelta(hours=1), clock=house.clock)
    works = {name: WorkInHand() for name in (living.id, "trainer-long-dead", "trainer-just-dead")}
    for name, work in works.items():
        await work.open(house.folder, name)
        work.close()
        os.utime(house.folder.path(f"{RECORDS}/{name}"), (0, 0))
    keep_record(house.folder, "trainer-just-dead")
    await house.keeping.run_step(StepName.REMOVE_ORPHANS)
    assert set(house.folder.folders(RECORDS)) == {f"{RECORDS}/{living.id}", f"{RECORDS}/trainer-just-dead"}
