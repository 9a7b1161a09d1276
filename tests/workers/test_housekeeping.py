"""Housekeeping deletes what has expired or has no owner, and keeps what is in use."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, update

from contracts.ids import CheckpointId, RunId, SessionId, TenantId
from contracts.operations import LoraSettings
from contracts.paths import Segment
from ledger.publication import LocalPublication
from migrations.upgrade import upgrade
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.tables import Checkpoint, Run, Session, VersionCommand
from tenants.checkpoints import NewCheckpoint, directory_of, new_checkpoint_id, record_checkpoint
from tenants.keys import create_tenant
from tenants.runs import NewRun, create_run
from tenants.samplers import NewSampler, create_sampler
from tenants.sessions import NewSession, create_session
from tests.workers.runtimes import make_runtime
from workers.housekeeping import Housekeeping


@dataclass
class House:
    """A database, its folder and a clock that the test moves."""

    database: Database
    folder: DataFolder
    keeping: Housekeeping
    now: datetime
    publication: LocalPublication = field(default_factory=LocalPublication)

    def clock(self) -> datetime:
        """Return the time that the test set."""
        return self.now

    async def run(self, tenant_name: str) -> tuple[TenantId, SessionId, RunId]:
        """Make a tenant with a session and a run."""
        async with self.database.write() as transaction:
            tenant = await create_tenant(transaction, name=tenant_name, clock=self.clock)
            session = await create_session(transaction, tenant, NewSession([], None, "raw", None, None), self.clock)
            new = NewRun(session, 0, "base", LoraSettings(4, seed=1), None)
            return tenant, session, await create_run(transaction, tenant, new, self.clock)

    async def checkpoint(
        self, tenant: TenantId, run: RunId, name: str, *, ttl: int | None = None, listed: bool = True
    ) -> CheckpointId:
        """Record a checkpoint with a file."""
        checkpoint = new_checkpoint_id()
        path = self.folder.path(directory_of(checkpoint))
        path.mkdir(parents=True)
        (path / "adapter_model.safetensors").write_bytes(b"x")
        new = NewCheckpoint(checkpoint, run, Segment.SAMPLER_WEIGHTS, name, 1, ttl, listed, None)
        async with self.database.write() as transaction:
            await record_checkpoint(transaction, tenant, new, self.clock)
        return checkpoint

    async def checkpoints(self) -> set[str]:
        """Return the recorded checkpoints; fail unless exactly their folders are there."""
        async with self.database.read() as session:
            rows = set(await session.scalars(select(Checkpoint.id)))
        assert {folder.rpartition("/")[2] for folder in self.folder.folders("checkpoints")} == rows
        return rows


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """An empty service."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'weft.db'}"
    upgrade(url)
    database = Database(create_engine(url))
    folder = DataFolder(tmp_path)
    made = House(database, folder, None, datetime(2030, 1, 1, tzinfo=UTC))  # type: ignore[arg-type]
    runtime = replace(make_runtime(database, tmp_path, made.clock), publication=made.publication)
    made.keeping = Housekeeping(runtime, lambda: True)
    yield made
    await database.close()


async def test_a_version_command_whose_sender_died_goes(house: House) -> None:
    async with house.database.write() as transaction:
        for command, age in (("old", timedelta(hours=2)), ("new", timedelta(minutes=1))):
            made = house.now - age
            transaction.add(VersionCommand(id=command, process_id="pool", kind="prepare", version="v", created_at=made))
    await house.keeping.sweep()
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
    await house.keeping.sweep()
    assert withdrawn == [(going, True)]
    assert not house.folder.path(directory_of(going)).exists()
    assert house.folder.path(directory_of(kept)).exists()


async def test_expired_checkpoint_goes_with_its_files(house: House) -> None:
    tenant, _, run = await house.run("first")
    other, _, other_run = await house.run("second")
    await house.checkpoint(tenant, run, "short", ttl=60)
    kept = {await house.checkpoint(tenant, run, "kept"), await house.checkpoint(other, other_run, "theirs", ttl=600)}
    house.now += timedelta(seconds=61)
    await house.keeping.sweep()
    assert await house.checkpoints() == kept


async def test_nameless_version_stays_while_a_sampler_uses_it(house: House) -> None:
    tenant, session, run = await house.run("first")
    used = await house.checkpoint(tenant, run, "used", listed=False)
    await house.checkpoint(tenant, run, "replaced", listed=False)
    async with house.database.write() as transaction:
        await create_sampler(
            transaction, tenant, NewSampler(session, 0, "base", checkpoint_id=used, live_run_id=run), house.clock
        )
        await transaction.execute(update(Session).values(last_seen_at=house.now + timedelta(days=1)))
    house.now += timedelta(hours=2)
    await house.keeping.sweep()
    assert await house.checkpoints() == {used}


async def test_silent_session_ends_and_a_training_one_goes_on(house: House) -> None:
    _, silent, _ = await house.run("first")
    _, training, run = await house.run("second")
    house.now += timedelta(hours=2)
    async with house.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == run).values(last_request_at=house.now))
    await house.keeping.sweep()
    async with house.database.read() as session:
        rows = (await session.execute(select(Session.id, Session.end_reason))).all()
        ended = {row.id: row.end_reason for row in rows}
    assert ended == {silent: "timed_out", training: None}


async def test_folder_that_no_row_names_goes_at_the_start(house: House) -> None:
    tenant, _, run = await house.run("first")
    kept = await house.checkpoint(tenant, run, "kept")
    for orphan in ("checkpoints/orphan", "checkpoints/.half.written", "snapshots/orphan"):
        house.folder.path(orphan).mkdir(parents=True)
    await house.keeping.remove_orphans()
    assert await house.checkpoints() == {kept}
    assert house.folder.folders("snapshots") == []


async def test_loop_sweeps_and_stops(house: House) -> None:
    house.keeping.stop()
    await house.keeping.run()
