"""One real vLLM server for the tests of this folder, and replicas over it. Needs ``make vllm``."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine.sampling.trainer_forward import TrainerForward
from engine.sampling.vllm.command import server_command
from engine.sampling.vllm.model_memory import ModelMemory
from engine.sampling.vllm.process import VllmProcess, VllmProcessSettings
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.server_memory import MemoryNeed
from engine.sampling.vllm.settings import VllmReplicaSettings
from tests.conftest import ROOT, missing_service
from tests.engine.sampling.conftest import Adapted
from tests.engine.sampling.drawing import Client, DrawnSequence
from tests.engine.sampling.replicas import SEQUENCES
from tests.engine.sampling.vllm.scripted import ScriptedServer, scripted_server
from tests.unix_http import unix_client
from workers.base_forward import BaseForward

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SERVED = "weft/tiny"
MAX_RANK = 8
MAX_RESIDENT = 6
EXACT = 1e-5  # seen: 2e-6


def assert_greedy(sequence: DrawnSequence, who: Adapted, prompt: list[int], length: int | None = None) -> None:
    """Each token is the likeliest after those before it in a forward pass of the reference, with its logprob."""
    if length is not None:
        assert len(sequence.ids) == length
    table = who.logprobs(prompt, sequence.ids)[len(prompt) :]
    assert sequence.ids == table.argmax(1).tolist()
    np.testing.assert_allclose(sequence.logprobs, table.max(1), atol=EXACT)


def process_settings(world: Any, folder: Path, **changes: Any) -> VllmProcessSettings:
    settings = VllmProcessSettings(
        command=server_command(PYTHON),
        model=world.base.facts.path,
        served_model=SERVED,
        log=folder / "server.log",
        context_length=world.base.facts.context_length,
        max_lora_rank=MAX_RANK,
        max_loras=4,
        max_cpu_loras=MAX_RESIDENT + 1,
        on_cpu=True,
        head_adapters=True,
        dtype="float32",
        need=MemoryNeed(
            model=ModelMemory.read(world.base.facts.path, dtype="float32", max_rank=MAX_RANK, adapters=4),
            context_length=world.base.facts.context_length,
            sequences=SEQUENCES,
        ),
        max_sequences=SEQUENCES,
    )
    return replace(settings, **changes)


@contextmanager
def running_server(settings: VllmProcessSettings) -> Iterator[VllmProcess]:
    """A server that outlives the event loops of single tests."""
    if not PYTHON.exists():
        missing_service("vLLM", "no .venv-vllm; run: make vllm")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(work: Any) -> None:
        done: Future[None] = asyncio.run_coroutine_threadsafe(work, loop)
        done.result()

    process = VllmProcess(settings)
    try:
        there(process.start())
        yield process
    finally:
        there(process.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def replica_settings(world: Any, server: VllmProcess, folder: Path) -> VllmReplicaSettings:
    return VllmReplicaSettings(
        name="vllm-test",
        base_url=server.base_url,
        served_model=SERVED,
        base=world.base.facts,
        zero_adapter=folder / "zero",
        max_lora_rank=MAX_RANK,
        max_loras=4,
        max_resident=MAX_RESIDENT,
        head_adapters=True,
    )


def ask_server(settings: VllmReplicaSettings, method: str, path: str, body: object = None) -> httpx.Response:
    """Ask the server behind the replica's back. Raises ``httpx.ConnectError`` when it is gone."""
    with unix_client(settings.base_url.removeprefix("unix://")) as http:
        return http.request(method, path, json=body)


@pytest.fixture(scope="package")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="package")
def server(world: Any, server_folder: Path) -> Iterator[VllmProcess]:
    with running_server(process_settings(world, server_folder)) as process:
        yield process


@pytest.fixture(scope="package")
def settings(world: Any, server: VllmProcess, server_folder: Path) -> VllmReplicaSettings:
    return replica_settings(world, server, server_folder)


@asynccontextmanager
async def serving(settings: VllmReplicaSettings, forward: TrainerForward | None = None) -> AsyncIterator[Client]:
    """A started replica, which leaves the server as it found it."""
    replica = VllmReplica(settings, forward)
    await replica.start()
    try:
        yield Client(replica)
    finally:
        for name in (await replica.health()).adapters:
            await replica.unload(name)
        await replica.close()


@pytest.fixture
async def client(settings: VllmReplicaSettings, world: Any) -> AsyncIterator[Client]:
    forward = BaseForward(world.base)
    async with serving(settings, forward) as client:
        yield client
    await forward.close()


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as server:
        yield server
