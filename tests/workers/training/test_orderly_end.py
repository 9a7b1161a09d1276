"""An orderly end of a trainer: each run is free for others as soon as its state is safe."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from contracts.losses import LossName
from contracts.operations import SaveWeights
from ledger.wakeups import placements_topic
from store.repeat import wait_for
from store.tables import Run
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import BASE, Client, NewRig, Rig
from workers.training import snapshot_writer

SECONDS = 60.0


async def leased(rig: Rig) -> set[str]:
    """Return the runs that a trainer has."""
    async with rig.database.read() as session:
        return set(await session.scalars(select(Run.id).where(Run.trainer_id.is_not(None))))


async def until_leased(rig: Rig, *clients: Client) -> None:
    """Wait until a trainer has the runs of these clients, and no other run."""
    wanted = {client.run for client in clients}
    async with asyncio.timeout(SECONDS):
        while await leased(rig) != wanted:
            await wait_for(asyncio.Event(), 0.02)


async def test_a_trainer_that_ends_gives_up_each_run_as_its_snapshot_is_written(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run is unchanged since its snapshot. The disk hangs at the snapshots of two others, and lets them go in turn."""
    rig = new_rig()
    gates: dict[int, threading.Event] = {}
    write, loop, hanging = snapshot_writer.write_state, asyncio.get_running_loop(), asyncio.Semaphore(0)

    def hang(directory: Path, base: Any, state: Any) -> Any:
        loop.call_soon_threadsafe(hanging.release)
        assert gates[state.weights.settings.seed].wait(SECONDS)
        return write(directory, base, state)

    working = asyncio.create_task(rig.worker.run())
    unchanged, first, second = await rig.clients("unchanged", "first", "second")
    await unchanged.do(SaveWeights("kept"))
    await rig.residency.snapshot_all(_nothing)
    for number, client in enumerate((first, second)):
        await client.do(make_batch(number, LossName.CROSS_ENTROPY, (6,)))
        gates[client.lora.seed or 0] = threading.Event()
    monkeypatch.setattr(snapshot_writer, "write_state", hang)
    with rig.ledger.wakeups.listen(placements_topic(BASE)) as placed:
        rig.worker.stop()
        async with asyncio.timeout(SECONDS):
            await hanging.acquire()
            await hanging.acquire()
            await placed.wait()
        await until_leased(rig, first, second)
        gates[second.lora.seed or 0].set()
        await until_leased(rig, first)
        gates[first.lora.seed or 0].set()
        async with asyncio.timeout(SECONDS):
            await working
    assert await leased(rig) == set()


async def _nothing(_run: str) -> None:
    pass
