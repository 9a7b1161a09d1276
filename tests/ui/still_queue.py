"""A queue that stands still: work of two tenants for a trainer and a pool that renew their leases and do nothing."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
from sqlalchemy import delete, update

from contracts.ids import RequestId
from contracts.ledger_records import NewOperation, OperationState
from contracts.losses import LossName
from contracts.operations import LoraSettings, LossSpec, OperationKind, SampleRequest, TrainingBatch
from contracts.sample_demand import SampleDemand
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.wakeups import Wakeups
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database
from store.tables import Operation, Run, RunState, WorkerProcess
from telemetry.telemetry import Telemetry
from tenants.runs import NewRun
from tenants.samplers import NewSampler, create_sampler
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import find_tenant
from testing.runs import create_run
from tests.payloads import digest, stored

BASE = "weft/still"
TRAINER = "trainer-still"
PASS_TOKENS = 1024
PASS = TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [])
SAMPLE = SampleRequest(np.array([7], np.int64))


@dataclass
class StillQueue:
    """Operations of a queue, by tenant and kind, in the order in which they came."""

    data: Path
    passes: dict[str, list[RequestId]] = field(default_factory=dict)
    samples: dict[str, list[RequestId]] = field(default_factory=dict)

    async def fill(self, database: Database) -> None:
        """Have ``cats`` and ``dogs`` send passes and samples in turns, of different lengths."""
        telemetry = Telemetry.of("test", utc_now)
        ledger = Ledger(database, Wakeups(), utc_now, telemetry, PayloadFiles(DataFolder(self.data)))
        async with database.write() as transaction:
            for kind, capacity in (("trainer", PASS_TOKENS), ("pool", 1000)):
                transaction.add(_process(kind, capacity))
        for tenant_name, count, tokens in (("dogs", 5, 300), ("cats", 3, 100)):
            async with database.write() as transaction:
                tenant = await find_tenant(transaction, name=tenant_name)
                session = await create_session(transaction, tenant, NewSession([], None, "0.38.0", None, None), utc_now)
                lora = LoraSettings(rank=8, seed=1)
                run = await create_run(transaction, tenant, NewRun(session, 0, BASE, lora, None), utc_now)
                sampler = await create_sampler(transaction, tenant, NewSampler(session, 0, BASE), utc_now)
                ready = {"state": RunState.READY, "next_seq_id": 1, "trainer_id": TRAINER, "lease_token": 1}
                await transaction.execute(update(Run).where(Run.id == run).values(**ready))
                passes = [
                    NewOperation(
                        tenant, run, number, OperationKind.FORWARD, BASE, stored(PASS), digest(PASS), tokens, TRAINER
                    )
                    for number in range(1, count + 1)
                ]
                samples = [
                    NewOperation(
                        tenant,
                        sampler,
                        number,
                        OperationKind.SAMPLE,
                        BASE,
                        stored(SAMPLE),
                        digest(SAMPLE),
                        1,
                        demand=SampleDemand(tokens, tokens),
                    )
                    for number in range(count)
                ]
                self.passes[tenant_name] = [await ledger.accept(transaction, one) for one in passes]
                self.samples[tenant_name] = [await ledger.accept(transaction, one) for one in samples]

    async def end_passes(self, database: Database) -> None:
        """Have the first two passes of ``dogs`` end, ten seconds apart."""
        for number, request in enumerate(self.passes["dogs"][:2]):
            ended = {"state": OperationState.DONE, "finished_at": utc_now() + timedelta(seconds=10 * number)}
            async with database.write() as transaction:
                await transaction.execute(update(Operation).where(Operation.id == request).values(**ended))

    async def empty(self, database: Database) -> None:
        """Remove it."""
        async with database.write() as transaction:
            await transaction.execute(delete(Operation).where(Operation.base_model == BASE))
            await transaction.execute(delete(WorkerProcess).where(WorkerProcess.base_model == BASE))
            await transaction.execute(
                update(Run).where(Run.base_model == BASE).values(state=RunState.UNLOADED, trainer_id=None)
            )


def _process(kind: str, capacity: int) -> WorkerProcess:
    now = utc_now()
    return WorkerProcess(
        id=f"{kind}-still",
        kind=kind,
        base_model=BASE,
        host="elsewhere",
        pid=7,
        started_at=now,
        expires_at=now + timedelta(hours=1),
        capacity=capacity,
    )
