"""The accepting parts of several API processes over one PostgreSQL, and the operations that tests send them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sqlalchemy import update

from contracts.ids import RunId, TenantId
from contracts.ledger_records import NewOperation, StoredPayload
from contracts.operations import (
    LoraSettings,
    OperationKind,
    OptimStep,
    SampleRequest,
    SamplingParams,
)
from contracts.sample_demand import demand_of
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.sample_intake import SampleIntake
from ledger.training_intake import TrainingIntake
from ledger.wakeups import Wakeups
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.settings import Settings
from store.tables import Run, RunState
from telemetry.telemetry import Telemetry
from tenants.limits import Limits
from tenants.runs import NewRun
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import find_tenant
from testing.runs import create_run
from tests.payloads import digest, stored

BASE = "test/tiny"
CONNECTIONS = 8
"""Connections of each process: PostgreSQL has a hundred, for tests beside, too."""
PROCESSES = 3
MOST = 7
DEFAULTS = Limits.of(Settings())


class TellingWakeups(Wakeups):
    """Wake-ups that tell when somebody listens."""

    def __init__(self) -> None:
        super().__init__()
        self.listened = asyncio.Event()

    @contextmanager
    def listen(self, *topics: str, event: asyncio.Event | None = None) -> Iterator[asyncio.Event]:
        with super().listen(*topics, event=event) as listening:
            self.listened.set()
            yield listening


@dataclass
class Process:
    """The accepting parts of one API process."""

    url: str
    database: Database
    ledger: Ledger
    samples: SampleIntake
    training: TrainingIntake
    wakeups: TellingWakeups


def process(url: str, folder: Path, *, hold_seconds: float = 0.0) -> Process:
    database = Database(create_engine(url, pool_size=CONNECTIONS))
    telemetry = Telemetry.of("test", utc_now)
    wakeups = TellingWakeups()
    ledger = Ledger(database, wakeups, utc_now, telemetry, PayloadFiles(DataFolder(folder)))
    samples = SampleIntake(database, ledger, utc_now, telemetry, defaults=DEFAULTS)
    training = TrainingIntake(database, ledger, defaults=DEFAULTS, hold_seconds=hold_seconds)
    return Process(url, database, ledger, samples, training, wakeups)


async def tenant(processes: list[Process], name: str) -> TenantId:

    async with processes[0].database.read() as session:
        return await find_tenant(session, name=name)


def sample(tenant: TenantId, seq_id: int, *, max_tokens: int = 1) -> NewOperation:
    payload = SampleRequest(np.arange(4, dtype=np.int64), params=SamplingParams(max_tokens=max_tokens))
    demand = demand_of(payload, 128)
    return NewOperation(
        tenant,
        f"{tenant}:sample:0",
        seq_id,
        OperationKind.SAMPLE,
        BASE,
        stored(payload),
        digest(payload),
        demand=demand,
    )


def step(tenant: TenantId, run: RunId, seq_id: int, *, nbytes: int = 0) -> NewOperation:
    """An optimizer step, or a pass whose payload takes so many bytes."""
    step = OptimStep(learning_rate=seq_id * 1e-3)
    kind = OperationKind.FORWARD if nbytes else OperationKind.OPTIM_STEP
    payload = StoredPayload(bytes(nbytes)) if nbytes else stored(step)
    return NewOperation(tenant, run, seq_id, kind, BASE, payload, digest(step))


async def ready_run(one: Process, tenant: TenantId) -> RunId:
    """A run whose next seq_id is 1."""
    async with one.database.write() as transaction:
        session = await create_session(transaction, tenant, NewSession([], None, "", None, None), utc_now)
        new = NewRun(session, 0, BASE, LoraSettings(rank=4, seed=7), None)
        run = await create_run(transaction, tenant, new, utc_now)
        await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.READY, next_seq_id=1))
    return run
