"""A nursery of trainers: each dies (SIGKILL) when it computes a sequence that begins with a certain token.

Run as a module: ``mortal_trainer DATABASE_URL DATA MODEL DEADLY_TOKEN MOST_LIVES``. The base is loaded once; each trainer is
a fork. A trainer that lives until nothing is pending ends in order, and the nursery with it. The last line printed is the
number of deaths.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from sqlalchemy import func, select

from contracts.base_model import read_base_model_facts
from contracts.ledger_records import OperationState
from engine.model.base import BaseModel
from engine.training.pass_operation import PassPiece
from engine.training.trainer import ComputedPass, Trainer
from store.clock import utc_now
from store.database import Database, create_engine
from store.repeat import repeat
from store.tables import Operation
from tests.workers.runtimes import make_runtime
from tests.workers.training.conftest import BASE
from workers.compute_thread import ComputeThread
from workers.leases.processes import declare_all_dead
from workers.training.trainer_wiring import wire_worker
from workers.training.training_engine import TrainingEngine


class MortalTrainer(Trainer):
    """A trainer that the deadly token kills."""

    deadly = -1

    def compute(self, pieces: Sequence[PassPiece], *, slots: int | None = None) -> ComputedPass:
        """Die, or compute as usual."""
        for piece in pieces:
            data = piece.operation.batch.data[piece.first :][: piece.sequences]
            if any(datum.tokens[0] == self.deadly for datum in data):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().compute(pieces, slots=slots)


async def live(base: BaseModel, url: str, data: Path, deadly: int) -> None:
    """Train until nothing is pending."""
    database = Database(create_engine(url))
    async with database.write() as transaction:
        await declare_all_dead(transaction)
    runtime = make_runtime(database, data, utc_now)
    trainer = MortalTrainer(base)
    trainer.deadly = deadly
    engine = TrainingEngine(trainer, ComputeThread("t"), runtime.telemetry.training(BASE), 2048)
    worker, is_done = wire_worker(runtime, engine), asyncio.Event()

    async def look() -> None:
        async with database.read() as session:
            pending = select(func.count()).where(Operation.state == OperationState.PENDING)
            if not await session.scalar(pending):
                is_done.set()

    running = asyncio.create_task(worker.run())
    await repeat(look, seconds=0.05, stopping=is_done, failed="the ledger could not be read")
    worker.stop()
    await running
    await database.close()


def main(url: str, data: str, model: str, deadly: str, most_lives: str) -> None:
    """Let trainers live and die, one after another."""
    # Threads of OpenMP would not survive the fork.
    torch.set_num_threads(1)
    base = BaseModel.load(read_base_model_facts(BASE, Path(model), None))
    for deaths in range(int(most_lives)):
        child = os.fork()
        if not child:
            asyncio.run(live(base, url, Path(data), int(deadly)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            print(deaths)
            sys.exit(os.waitstatus_to_exitcode(status))
    print(most_lives)


if __name__ == "__main__":
    main(*sys.argv[1:])
