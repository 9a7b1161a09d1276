"""Servers of one process on one GPU start one after another, with a stand-in of vLLM and of the GPUs."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine.machine_memory import Gpu
from engine.sampling.vllm.memory_claims import memory_claims
from engine.sampling.vllm.model_memory import ModelMemory
from engine.sampling.vllm.process import VllmProcess
from engine.sampling.vllm.server_memory import MemoryNeed
from engine.sampling.vllm.start_turns import end_of_turn, is_someones_turn, turn
from tests.engine.sampling.vllm.test_process import settings_of

GIB = 2**30
NEED = MemoryNeed(
    model=ModelMemory(weights=GIB, adapters=0, token=1024), context_length=128, sequences=2, servers=2, trainer_gpu=None
)
SOON_S = 20.0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Gpu]:
    """GPUs that the driver tells, which a test may change."""
    told = [Gpu(0, "a", 80 * GIB, 60 * GIB)]
    monkeypatch.setattr("engine.sampling.vllm.memory_claims.visible_gpus", lambda: list(told))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return told


def server(folder: Path, name: str, mode: str) -> VllmProcess:
    """A stand-in; one that is sick is never up."""
    (folder / name).mkdir()
    return VllmProcess(replace(settings_of(folder / name, mode), need=NEED, start_deadline_s=4 * SOON_S))


def was_started(folder: Path, name: str) -> bool:
    return "pids" in (folder / name / "server.log").read_text() if (folder / name / "server.log").exists() else False


class Signs:
    """Events that are set when a server's turn begins, and when a server waits for another's; and the order of all turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.waits = asyncio.Event(), asyncio.Event()
        self.order: list[str] = []
        monkeypatch.setattr("engine.sampling.vllm.process.turn", self._turn)
        monkeypatch.setattr("engine.sampling.vllm.process.end_of_turn", self._end_of_turn)

    @contextmanager
    def _turn(self, gpus: Sequence[str]) -> Iterator[None]:
        with turn(gpus):
            self.order.append("begins")
            self.began.set()
            yield
            self.order.append("is up")

    async def _end_of_turn(self, gpus: Sequence[str]) -> None:
        self.waits.set()
        await end_of_turn(gpus)


@pytest.fixture
async def signs(monkeypatch: pytest.MonkeyPatch) -> Signs:
    return Signs(monkeypatch)


async def shown(sign: asyncio.Event) -> None:
    async with asyncio.timeout(SOON_S):
        await sign.wait()


async def behind_another(
    folder: Path, second: VllmProcess, signs: Signs
) -> tuple["asyncio.Task[None]", "asyncio.Task[None]"]:
    """Have ``second`` wait behind a server that never comes up; return the starts of both."""
    starting = asyncio.create_task(server(folder, "first", "sick").start())
    await shown(signs.began)
    waiting = asyncio.create_task(second.start())
    await shown(signs.waits)
    return starting, waiting


async def test_a_second_server_on_a_gpu_waits_for_the_end_of_the_firsts_start(
    tmp_path: Path, gpus: list[Gpu], signs: Signs
) -> None:
    second = server(tmp_path, "second", "good")
    starting, waiting = await behind_another(tmp_path, second, signs)
    # What is free then counts, not what was when the wait began; and what the waiting one was promised is taken back.
    gpus[0] = replace(gpus[0], free=40 * GIB)
    assert len(list(memory_claims())) == 1
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    async with AsyncExitStack() as running:
        running.push_async_callback(second.stop)
        await waiting
        assert second.memory is not None
        assert second.memory.given == 18 * GIB
        (claim,) = memory_claims()
        assert (claim.owner, claim.untaken) == (os.getpid(), 0)
    assert signs.order == ["begins", "begins", "is up"]
    assert not is_someones_turn(["a"])


async def test_a_server_on_another_gpu_does_not_wait(tmp_path: Path, gpus: list[Gpu], signs: Signs) -> None:
    gpus.append(Gpu(1, "b", 80 * GIB, 50 * GIB))
    first, second = server(tmp_path, "first", "sick"), server(tmp_path, "second", "good")
    starting = asyncio.create_task(first.start())
    try:
        await shown(signs.began)
        async with second:
            assert second.memory is not None
            assert second.memory.gpus == ("b",)
            assert not starting.done()
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    assert not is_someones_turn(["a", "b"])


async def test_a_server_that_is_given_up_while_it_waits_leaves_nothing(
    tmp_path: Path, gpus: list[Gpu], signs: Signs
) -> None:
    second = server(tmp_path, "second", "good")
    starting, waiting = await behind_another(tmp_path, second, signs)
    for task in (waiting, starting):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not was_started(tmp_path, "second")
    assert not is_someones_turn(["a"])
    assert list(memory_claims()) == []
