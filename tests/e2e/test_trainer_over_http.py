"""The trainer's promises over real HTTP: room for so many models, passes shared by tenants, a disk that stands still."""

import asyncio
import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
import pytest_asyncio
import uvicorn

from api.app import create_app
from api.services import ApiServices
from bench.clients.sdk_clients import SdkClients
from bench.workload import OperationShape
from contracts.base_model import read_base_model_facts
from engine.sampling.vocabulary import read_vocabulary
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.publication import LocalPublication
from ledger.runtime import Runtime
from ledger.token_feed import TokenFeed
from ledger.wakeups import Wakeups
from migrations.upgrade import upgrade
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.settings import Settings
from telemetry.readiness import Readiness
from telemetry.telemetry import Telemetry
from testing.service_process import ServiceProcess
from testing.tenants import make_tenants, new_tenant
from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient, pass_message
from tests.workers.training.conftest import busy_file_threads
from workers.embedded import EmbeddedRunner

TOKENS = [72, 101, 108, 108, 111]
DEADLINE = 60.0
WAITING = Path(__file__).with_name("sdk_waiting.py")
VOCABULARY = 300
_ALL = 10**9

T = TypeVar("T")


def poll(client: RawClient, promise: httpx.Response) -> httpx.Response:
    """One poll of a promise."""
    return client.http.post("/retrieve_future", json={"request_id": promise.json()["request_id"]})


def until(is_so: Callable[[], bool], what: str) -> None:
    """Ask again and again, each time over HTTP."""
    deadline = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < deadline, what


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[tuple[ServiceProcess, Path]]:
    """A service with room for four models that logs every pass; each test leaves none behind."""
    data = tmp_path_factory.mktemp("limited") / "data"
    environment = {"WEFT_MAX_ADAPTERS": "4", "WEFT_POLL_HOLD": "PT0.1S", "WEFT_LOG_LEVEL": "debug"}
    bases = [f"{BASE_NAME}={tiny_model_dir}"]
    with ServiceProcess(data=data, base_models=bases, environment=environment) as process:
        yield process, data


def end_sessions(client: RawClient) -> None:
    """End all of the tenant's sessions, so that their models are open no more."""
    for run in client.http.get("/training_runs").json()["training_runs"]:
        session = run["training_run_id"].partition(":")[0]
        client.post(f"/sessions/{session}/finish", reason={"type": "success"})
    client.close()


def test_a_model_beyond_the_limit_waits_and_is_made_when_another_is_unloaded(
    limited: tuple[ServiceProcess, Path],
) -> None:
    """The first tenant has all four, and trains on; the second's SDK client waits, and one more model after it."""
    process, data = limited
    first, second = (RawClient(process.base_url, key) for key in make_tenants(data, ["first", "second"]))
    leaving, next_to_leave, staying, _ = [first.model(BASE_NAME) for _ in range(4)]
    command = [sys.executable, str(WAITING), process.base_url, second.key, BASE_NAME]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: len(second.http.get("/training_runs").json()["training_runs"]) == 1, "no model was asked for")
        lora = {"rank": 4, "seed": 1}
        later = second.post(
            "/create_model", session_id=second.session(), model_seq_id=0, base_model=BASE_NAME, lora_config=lora
        )
        held = poll(second, later)
        assert (held.status_code, held.json()["queue_state"]) == (408, "paused_capacity")
        assert held.json()["queue_state_reason"].startswith("4 models are open on weft/tiny")
        assert first.result(first.passes(pass_message(staying, 1, TOKENS)))["metrics"]["loss:sum"] > 0
        assert waiting.poll() is None
        first.result(first.post("/unload_model", model_id=leaving))
        said, _ = waiting.communicate(timeout=DEADLINE)
        assert float(said) > 0
        assert poll(second, later).json()["queue_state"] == "paused_capacity"
        assert "error" not in first.result(first.step(staying, 2))
        first.result(first.post("/unload_model", model_id=next_to_leave))
        assert second.result(later)["model_id"]
    finally:
        waiting.kill()
        waiting.communicate()
        for client in (first, second):
            end_sessions(client)


def test_pipelining_sdk_clients_of_several_tenants_share_passes(limited: tuple[ServiceProcess, Path]) -> None:
    """Each keeps two steps on their way, of ``forward_backward`` and ``optim_step``: passes still serve several tenants."""
    process, data = limited
    before = len(process.log_tail(_ALL))
    keys = make_tenants(data, ["a", "b", "c", "d"])
    with SdkClients(base_url=process.base_url, keys=keys, base_model=BASE_NAME) as clients:
        clients.start_run(OperationShape(4, 64), vocabulary=VOCABULARY, in_flight=2, steps=8)
        report = clients.finish_run()
    assert [len(steps) for steps in report.steps] == [8] * 4
    lines = re.findall(r"pass base=\S+ tenants=(\d+) adapters=(\d+) .* tokens=(\d+)", process.log_tail(_ALL)[before:])
    tenants = [int(line[0]) for line in lines]
    assert sum(int(line[2]) for line in lines) == 4 * 8 * 4 * 64
    assert sum(tenants) / len(tenants) > 1.5
    assert all(line[0] == line[1] for line in lines)


@dataclass
class InProcess:
    """The whole service in this process: its file threads can be held up. Calls come from threads of their own."""

    url: str
    keys: list[str]
    callers: ThreadPoolExecutor

    async def call(self, call: Callable[..., T], *positional: object, **named: object) -> T:
        """A blocking call beside the service's loop."""
        return await asyncio.get_running_loop().run_in_executor(self.callers, partial(call, *positional, **named))


@pytest_asyncio.fixture
async def in_process(tmp_path: Path, tiny_model_dir: Path) -> AsyncIterator[InProcess]:
    """API and trainer of the tiny base on a free port, composed as ``weft serve`` does."""
    settings = Settings(data_dir=tmp_path, poll_hold=timedelta(seconds=0.1))
    await asyncio.to_thread(upgrade, settings.resolved_database_url())
    database, wakeups, folder = (
        Database(create_engine(settings.resolved_database_url())),
        Wakeups(),
        DataFolder(tmp_path),
    )
    telemetry = Telemetry.of("test", utc_now)
    ledger, publication = Ledger(database, wakeups, utc_now, telemetry, PayloadFiles(folder)), LocalPublication()
    runtime = Runtime(settings, database, ledger, wakeups, TokenFeed(), publication, folder, utc_now, telemetry)
    bases = {BASE_NAME: read_base_model_facts(BASE_NAME, tiny_model_dir, None)}
    vocabularies = {BASE_NAME: await asyncio.to_thread(read_vocabulary, tiny_model_dir)}
    runner = EmbeddedRunner(runtime, publication, bases, vocabularies)
    services = ApiServices.over(runtime, bases, vocabularies, Readiness())
    await runner.start()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    app = create_app(services)
    server = uvicorn.Server(uvicorn.Config(app, log_level=logging.WARNING, lifespan="off", timeout_keep_alive=75))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    keys = [await new_tenant(database, name) for name in ("saver", "other")]
    with ThreadPoolExecutor(max_workers=4) as callers:
        yield InProcess(f"http://127.0.0.1:{listener.getsockname()[1]}", keys, callers)
    wakeups.close()
    server.should_exit = True
    await serving
    await runner.stop()
    await database.close()


async def test_others_train_while_a_tenants_save_state_cannot_write_its_file(in_process: InProcess) -> None:
    call = in_process.call
    saver, other = (RawClient(in_process.url, key) for key in in_process.keys)
    mine, theirs = await call(saver.model, BASE_NAME), await call(other.model, BASE_NAME)
    await call(saver.result, await call(saver.passes, pass_message(mine, 1, TOKENS)))
    with busy_file_threads():
        saving = await call(saver.post, "/save_weights", model_id=mine, seq_id=2, path="held")
        after = await call(saver.step, mine, 3, learning_rate=1e-3)
        losses = []
        for number in range(4):
            computed = await call(other.passes, pass_message(theirs, 2 * number + 1, TOKENS))
            await call(other.step, theirs, 2 * number + 2, learning_rate=1e-2)
            losses.append((await call(other.result, computed))["metrics"]["loss:sum"])
        assert losses == sorted(losses, reverse=True)
        for promise in (saving, after):
            assert (await call(poll, saver, promise)).status_code == 408
    assert (await call(saver.result, saving))["path"].endswith("/weights/held")
    assert "error" not in await call(saver.result, after)
    for client in (saver, other):
        client.close()
