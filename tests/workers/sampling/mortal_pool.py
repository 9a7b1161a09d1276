"""A nursery of sampling processes: each dies (SIGKILL) when a certain token is in a prompt that it reads.

Run as a module: ``mortal_pool DATABASE_URL DATA MODEL DEADLY_TOKEN MOST_LIVES``. The base is loaded once; each process is a
fork. A process that lives until nothing is pending ends in order, and the nursery with it. The last line printed is the number
of deaths.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import func, select
from torch import Tensor

from contracts.base_model import read_base_model_facts
from contracts.ledger_records import OperationState
from engine.model.base import BaseModel
from engine.sampling.in_process.forward_pass import ForwardPass
from store.clock import utc_now
from store.database import Database, create_engine
from store.repeat import repeat
from store.tables import Operation
from tests.workers.runtimes import make_runtime
from tests.workers.sampling.bare_samples import BASE, make_sampling
from workers.leases.processes import declare_all_dead


async def live(base: BaseModel, url: str, data: Path, model: Path) -> None:
    """Sample until nothing is pending."""
    database = Database(create_engine(url))
    async with database.write() as transaction:
        await declare_all_dead(transaction)
    sampling, is_done = make_sampling(make_runtime(database, data, utc_now), base, model), asyncio.Event()

    async def look() -> None:
        async with database.read() as session:
            if not await session.scalar(select(func.count()).where(Operation.state == OperationState.PENDING)):
                is_done.set()

    await sampling.pool.start()
    running = asyncio.create_task(sampling.worker.run())
    await repeat(look, seconds=0.05, stopping=is_done, failed="the ledger could not be read")
    sampling.worker.stop()
    await running
    await sampling.pool.close()
    await database.close()


def main(url: str, data: str, model: str, deadly: str, most_lives: str) -> None:
    """Let processes live and die, one after another."""
    # Threads of OpenMP would not survive the fork.
    torch.set_num_threads(1)
    base = BaseModel.load(read_base_model_facts(BASE, Path(model), None))
    call = ForwardPass.__call__

    def die_or_call(self: ForwardPass, token_ids: Tensor, *rest: Any) -> Tensor:
        if token_ids.shape[1] > 1 and bool((token_ids == int(deadly)).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(self, token_ids, *rest)

    ForwardPass.__call__ = die_or_call  # type: ignore[assignment,method-assign]
    for deaths in range(int(most_lives)):
        child = os.fork()
        if not child:
            asyncio.run(live(base, url, Path(data), Path(model)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            print(deaths)
            sys.exit(os.waitstatus_to_exitcode(status))
    print(most_lives)


if __name__ == "__main__":
    main(*sys.argv[1:])
