"""A trainer's worker, wired as in production over a real database. The test accepts operations in the API's place."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.base_model import read_base_model_facts
from contracts.errors import EngineFailure, WeftError
from contracts.ids import RequestId, RunId, SessionId, TenantId
from contracts.ledger_records import UNLOAD_SEQ_ID, NewOperation, OperationState
from contracts.operations import (
    CreateModel,
    LoadWeights,
    LoraSettings,
    OperationKind,
    OptimStep,
    Payload,
    Result,
    SaveWeights,
    TrainingBatch,
    UnloadModel,
)
from contracts.paths import parse_path
from engine.model.base import BaseModel
from engine.model.device import SelfTest
from engine.training.adapter_state import AdapterState
from engine.training.trainer import PassItem, Trainer
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.publication import LocalPublication
from ledger.runtime import Runtime
from ledger.token_feed import TokenFeed
from ledger.wakeups import Wakeups
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.settings import Settings
from telemetry.telemetry import Telemetry
from telemetry.training_counts import TrainingCounts
from tenants.runs import NewRun
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.runs import create_run
from tests.payloads import digest, stored
from workers.compute_thread import ComputeThread
from workers.training.residency import AdapterResidency
from workers.training.trainer_wiring import wire_worker
from workers.training.training_engine import TrainingEngine
from workers.training.worker import TrainingWorker

BASE = "weft/tiny"
DEADLINE = 30.0
"""Seconds after which an expected event counts as missing."""
LEASE = timedelta(seconds=0.4)
PLENTY = 2**33


@dataclass
class Rig:
    """The parts of one base model's training. Nothing runs until ``running`` is entered."""

    database: Database
    ledger: Ledger
    trainer: Trainer
    compute: ComputeThread
    residency: AdapterResidency
    worker: TrainingWorker
    counts: TrainingCounts
    data_folder: DataFolder
    runtime: Runtime

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the worker meanwhile, and end it in order."""
        task = asyncio.create_task(self.worker.run())
        try:
            yield
        finally:
            self.worker.stop()
            async with asyncio.timeout(DEADLINE):
                await task

    async def client(self, name: str, lora: LoraSettings | None = None) -> "Client":
        """Make a tenant of that name with a session and a model. The model's creation is accepted, not waited for."""
        async with self.database.write() as transaction:
            tenant = await create_tenant(transaction, name=name, clock=utc_now)
            session = await create_session(transaction, tenant, NewSession([], None, "raw", None, None), utc_now)
        return await self.model(tenant, session, lora or LoraSettings(rank=4, seed=1))

    async def clients(self, *names: str) -> list["Client"]:
        """Make tenants of one model each, with weights of their own, and wait for the models."""
        made = []
        for number, name in enumerate(names):
            made.append(await self.client(name, LoraSettings(rank=4, seed=1 + number)))
            await made[-1].result(made[-1].created)
        return made

    async def model(self, tenant: TenantId, session: SessionId, lora: LoraSettings, number: int = 0) -> "Client":
        """Have the creation of another model of a tenant accepted."""
        async with self.database.write() as transaction:
            run = await create_run(transaction, tenant, NewRun(session, number, BASE, lora, None), utc_now)
        client = Client(self, tenant, session, run, lora)
        client.created = await client.send(CreateModel(BASE, lora), seq_id=0)
        return client


@dataclass
class Client:
    """One model of a tenant."""

    rig: Rig
    tenant: TenantId
    session: SessionId
    run: RunId
    lora: LoraSettings
    created: RequestId = field(default=RequestId(""))
    seq_id: int = 0

    async def send(
        self, payload: Payload, *, seq_id: int | None = None, kind: OperationKind | None = None
    ) -> RequestId:
        """Have an operation accepted, in a transaction of its own. ``seq_id`` None: the next one."""
        async with self.rig.database.write() as transaction:
            return await self.accept(transaction, payload, seq_id=seq_id, kind=kind)

    async def accept(
        self,
        transaction: AsyncSession,
        payload: Payload,
        *,
        seq_id: int | None = None,
        kind: OperationKind | None = None,
    ) -> RequestId:
        """Accept an operation within a transaction. The worker sees all operations of one transaction at once."""
        if seq_id is None:
            self.seq_id += 1
            seq_id = self.seq_id
        tokens = sum(len(datum.tokens) for datum in payload.data) if isinstance(payload, TrainingBatch) else 0
        kind = kind or _KINDS[type(payload)]
        loads = parse_path(payload.path) if isinstance(payload, LoadWeights) else None
        new = NewOperation(
            self.tenant, self.run, seq_id, kind, BASE, stored(payload), digest(payload), tokens, loads=loads
        )
        return await self.rig.ledger.accept(transaction, new)

    async def result(self, request: RequestId) -> Result:
        """Wait for the operation's result and return it. Raises ``EngineFailure`` with the text of its error."""
        status = await self.rig.ledger.wait_until_final(self.tenant, request, seconds=DEADLINE)
        if status.state is OperationState.FAILED:
            raise EngineFailure(status.error_message or "")
        assert status.state is OperationState.DONE, f"{status.kind} did not end in time"
        found = await self.rig.ledger.result(self.tenant, status)
        assert found is not None
        return found

    async def do(self, payload: Payload, *, kind: OperationKind | None = None) -> Result:
        """Send, and wait for the result."""
        return await self.result(await self.send(payload, kind=kind))

    async def unload(self) -> Result:
        """Unload the model, after everything sent before."""
        return await self.result(await self.send(UnloadModel(), seq_id=UNLOAD_SEQ_ID))

    async def is_pending(self, request: RequestId) -> bool:
        """Return whether the operation is still pending."""
        return (await self.rig.ledger.status(self.tenant, request)).state is OperationState.PENDING

    def state(self) -> AdapterState:
        """Return the adapter's state in memory."""
        return self.rig.trainer.state(self.run)


_KINDS: dict[type, OperationKind] = {
    CreateModel: OperationKind.CREATE_MODEL,
    SaveWeights: OperationKind.SAVE_WEIGHTS,
    UnloadModel: OperationKind.UNLOAD_MODEL,
    TrainingBatch: OperationKind.FORWARD_BACKWARD,
    OptimStep: OperationKind.OPTIM_STEP,
    LoadWeights: OperationKind.LOAD_WEIGHTS,
}


def undisturbed(base: BaseModel, lora: LoraSettings, operations: list[TrainingBatch | OptimStep]) -> AdapterState:
    """Return the state after the operations, computed one after another on another trainer."""
    trainer, run = Trainer(base), RunId("undisturbed")
    trainer.create(run, lora)
    for operation in operations:
        if isinstance(operation, OptimStep):
            trainer.optim_step(run, operation)
        else:
            outcome = trainer.run_pass([PassItem(run, operation, True)])[0]
            assert not isinstance(outcome, WeftError), outcome
    return trainer.state(run)


@contextmanager
def busy_file_threads() -> Iterator[None]:
    """Block the loop's file threads meanwhile, as a disk that hangs does."""
    gate, executor = Event(), ThreadPoolExecutor(max_workers=1)
    asyncio.get_running_loop().set_default_executor(executor)
    executor.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


@pytest.fixture(scope="session")
def base(tiny_model_dir: Path) -> BaseModel:
    """The tiny base, loaded once."""
    return BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))


NewRig = Callable[..., Rig]


@pytest_asyncio.fixture
async def new_rig(base: BaseModel, tmp_path: Path, migrated_database: Path) -> AsyncIterator[NewRig]:
    """Return a function that makes a rig. Its keywords are limits: memory, tokens of a pass, adapters.

    Rigs that work on one database at a time share ``wakeups``.
    """
    made: list[Rig] = []

    def make(
        *,
        url: str | None = None,
        wakeups: Wakeups | None = None,
        memory_bytes: int = PLENTY,
        token_budget: int = 2048,
        **options: int | timedelta,
    ) -> Rig:
        if url is None:
            shutil.copy(migrated_database, tmp_path / "weft.db")
            url = f"sqlite+aiosqlite:///{tmp_path / 'weft.db'}"
        made.append(_compose(base, url, wakeups or Wakeups(), tmp_path, memory_bytes, token_budget, **options))
        return made[-1]

    yield make
    for rig in made:
        await asyncio.to_thread(rig.compute.close)
        await rig.database.close()


def _compose(
    base: BaseModel,
    url: str,
    wakeups: Wakeups,
    folder: Path,
    memory_bytes: int,
    token_budget: int,
    **options: int | timedelta | None,
) -> Rig:
    told = {"lease": LEASE} | options
    settings = Settings(data_dir=folder, adapter_memory_bytes=memory_bytes, pass_token_budget=token_budget, **told)
    database = Database(create_engine(url))
    telemetry = Telemetry.of("test", utc_now)
    feed, publication, data_folder = TokenFeed(), LocalPublication(), DataFolder(folder)
    ledger = Ledger(database, wakeups, utc_now, telemetry, PayloadFiles(data_folder))
    runtime = Runtime(settings, database, ledger, wakeups, feed, publication, data_folder, utc_now, telemetry)
    trainer, compute = Trainer(base, pass_token_budget=token_budget), ComputeThread("t")
    engine = TrainingEngine(trainer, compute, telemetry.training(BASE), token_budget, SelfTest(base))
    worker = wire_worker(runtime, engine)
    counts = engine.telemetry.counts
    return Rig(database, ledger, trainer, compute, worker.residency, worker, counts, data_folder, runtime)
