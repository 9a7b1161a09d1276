"""Poison samples: one at which processes die fails after some deaths, alone, and its neighbours are drawn all the same."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from contracts.ledger_records import OperationState
from ledger.runtime import Runtime
from store.clock import utc_now
from store.database import Database, create_engine
from tests.conftest import ROOT
from tests.workers.runtimes import make_runtime
from tests.workers.sampling.bare_samples import make_drawer
from workers.sampling.suspect_turns import SuspectTurns

DEADLY = 311
MOST_ATTEMPTS = 3
MOST_LIVES = 7
SECONDS = 90.0


@pytest.fixture
async def runtime(migrated_database: Path, tmp_path: Path) -> AsyncIterator[Runtime]:
    """A runtime on SQLite."""
    shutil.copy(migrated_database, tmp_path / "weft.db")
    database = Database(create_engine(f"sqlite+aiosqlite:///{tmp_path}/weft.db"))
    yield make_runtime(database, tmp_path, utc_now)
    await database.close()


async def test_a_sample_that_kills_every_process_fails_alone_and_its_neighbours_are_drawn(
    runtime: Runtime, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Real processes die, with the neighbours' samples in flight."""
    poisoner, neighbour = await make_drawer(runtime), await make_drawer(runtime)
    deadly = await poisoner.send(DEADLY)
    sent = [
        (drawer, await drawer.send(5 + number, tokens=24)) for number in range(3) for drawer in (poisoner, neighbour)
    ]
    nursery = [sys.executable, "-m", "tests.workers.sampling.mortal_pool", f"sqlite+aiosqlite:///{tmp_path}/weft.db"]
    nursery += [str(tmp_path), str(tiny_model_dir), str(DEADLY), str(MOST_LIVES)]
    ended = await asyncio.to_thread(subprocess.run, nursery, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split()[-1:] == [str(MOST_ATTEMPTS)], ended.stderr[-4000:]
    failed = await poisoner.row(deadly)
    assert (failed.state, failed.error_code) == (OperationState.FAILED, "poison_operation")
    for drawer, request in sent:
        assert len((await drawer.result(request)).sequences) == 1
        assert (await drawer.row(request)).attempts < MOST_ATTEMPTS


async def test_a_suspect_with_one_attempt_left_is_drawn_without_other_suspects() -> None:
    """The suspect waits for those that are drawn, those that come wait for it, and ordinary samples wait for nobody."""
    turns = SuspectTurns(MOST_ATTEMPTS)
    entered = asyncio.Event()

    async def enter(attempts: int, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(turns.turn(attempts, "cat"))
        entered.set()

    async with asyncio.timeout(SECONDS), AsyncExitStack() as first, AsyncExitStack() as last, AsyncExitStack() as late:
        await enter(1, first)
        entered.clear()
        last_chance = asyncio.create_task(enter(2, last))
        await asyncio.sleep(0)
        latecomer = asyncio.create_task(enter(1, late))
        async with turns.turn(0, "cat"):
            assert not entered.is_set()
        await first.aclose()
        await last_chance
        assert not latecomer.done()
        await last.aclose()
        await latecomer
