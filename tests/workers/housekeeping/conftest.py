"""A house that a test keeps: a database, its folder, and a clock that the test moves."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import DeclarativeBase

from contracts.ids import CheckpointId, RequestId, RunId, SamplerId, SessionId, TenantId
from contracts.ledger_records import Completion, NewOperation, RunLease
from contracts.operations import LoraSettings, OperationKind, OptimStep, OptimStepped, SampleOutput, SampleRequest
from contracts.paths import Segment
from ledger.publication import LocalPublication
from ledger.runtime import Runtime
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.tables import Checkpoint, DiscardedFolder, ServicePresence
from tenants.checkpoints import NewCheckpoint, directory_of, new_checkpoint_id, record_checkpoint
from tenants.runs import NewRun
from tenants.samplers import NewSampler, create_sampler
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.runs import create_run
from tests.payloads import digest, stored
from tests.workers.presence import be_present
from tests.workers.runtimes import make_runtime
from workers.housekeeping.housekeeping import Housekeeping
from workers.housekeeping.presence import PresenceNotes


@dataclass
class House:
    """A database, its folder and a clock that the test moves."""

    database: Database
    folder: DataFolder
    keeping: Housekeeping
    now: datetime
    publication: LocalPublication = field(default_factory=LocalPublication)
    runtime: Runtime = field(init=False)

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

    async def sampler(
        self, tenant: TenantId, session: SessionId, number: int, version: CheckpointId, *, live: RunId | None = None
    ) -> SamplerId:
        """Make a sampler of the version."""
        new = NewSampler(session, number, "base", checkpoint_id=version, live_run_id=live)
        async with self.database.write() as transaction:
            return await create_sampler(transaction, tenant, new, self.clock)

    async def operation(self, tenant: TenantId, lane: str, seq_id: int, kind: OperationKind) -> RequestId:
        """Accept an operation."""
        payload = SampleRequest(np.arange(4, dtype=np.int64)) if kind is OperationKind.SAMPLE else OptimStep()
        new = NewOperation(tenant, lane, seq_id, kind, "base", stored(payload), digest(payload), tokens=4, trainer="t")
        async with self.database.write() as transaction:
            return await self.runtime.ledger.accept(transaction, new)

    async def finish(self, *requests: RequestId) -> None:
        """Write results for operations whose turn it is."""
        async with self.database.read() as session:
            ready = await self.runtime.ledger.load(session, requests)
        outcomes = {OperationKind.SAMPLE: SampleOutput([]), OperationKind.OPTIM_STEP: OptimStepped({})}
        # Leased to nobody, as are the runs.
        lease = RunLease(None, 0)  # type: ignore[arg-type]
        completions = [Completion(replace(one, lease=lease), outcomes[one.kind]) for one in ready]
        async with self.database.write() as transaction:
            await self.runtime.ledger.complete(transaction, completions)

    async def sweep(self, *, after_silence: bool = False) -> None:
        """Run every step, while the service is there for its clients: since long ago, or since now. Fail where a step fails."""
        await (PresenceNotes(self.runtime).note() if after_silence else be_present(self.runtime))
        for outcome in (await self.keeping.sweep()).values():
            if isinstance(outcome, BaseException):
                raise outcome

    async def empty_trash(self) -> None:
        """Sweep again when folders that were discarded may go."""
        self.now += timedelta(seconds=61)
        await self.sweep()

    async def pass_time(self, time: timedelta) -> None:
        """Let the time pass, with the service there for its clients all the while."""
        await PresenceNotes(self.runtime).note()
        self.now += time
        async with self.database.write() as transaction:
            await transaction.execute(update(ServicePresence).values(present_at=self.now))

    async def count(self, table: type[DeclarativeBase]) -> int:
        """Return the number of the table's rows."""
        async with self.database.read() as session:
            return await session.scalar(select(func.count()).select_from(table)) or 0

    async def checkpoints(self) -> set[str]:
        """Return the recorded checkpoints; fail unless exactly their folders, and those in the trash, are there."""
        async with self.database.read() as session:
            rows = set(await session.scalars(select(Checkpoint.id)))
            discarded = set(await session.scalars(select(DiscardedFolder.checkpoint_id)))
        assert {folder.rpartition("/")[2] for folder in self.folder.folders("checkpoints")} == rows | discarded
        return rows


@pytest.fixture
async def house(migrated_database: Path, tmp_path: Path) -> AsyncIterator[House]:
    """An empty service on SQLite."""
    shutil.copy(migrated_database, tmp_path / "weft.db")
    async with open_house(f"sqlite+aiosqlite:///{tmp_path}/weft.db", tmp_path) as made:
        yield made


@pytest.fixture
async def either_house(database_url: str, tmp_path: Path) -> AsyncIterator[House]:
    """An empty service on SQLite, and one on PostgreSQL."""
    async with open_house(database_url, tmp_path) as made:
        yield made


@asynccontextmanager
async def open_house(database_url: str, tmp_path: Path) -> AsyncIterator[House]:
    """An empty service over a database and a folder."""
    database = Database(create_engine(database_url))
    folder = DataFolder(tmp_path)
    made = House(database, folder, None, datetime(2030, 1, 1, tzinfo=UTC))  # type: ignore[arg-type]
    made.runtime = replace(make_runtime(database, tmp_path, made.clock), publication=made.publication)
    made.keeping = Housekeeping(made.runtime, lambda: True)
    yield made
    await database.close()
