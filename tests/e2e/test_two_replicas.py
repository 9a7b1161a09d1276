"""Two real vLLM servers of one service: one is killed in the midst of two tenants' samples."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testing.service_process import ServiceProcess
from tests.conftest import missing_service
from tests.e2e.conftest import BASE_NAME, VLLM_ENVIRONMENT, VLLM_PYTHON, Service, make_tenant
from tests.e2e.raw_client import RawClient
from tests.e2e.speaker import MEOW, Speaker, teach

RESTART_SECONDS = 150.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Service]:
    """``weft serve`` with two servers."""
    if not VLLM_PYTHON.exists():
        missing_service("vLLM", "no .venv-vllm; run: make vllm")
    data = tmp_path_factory.mktemp("two") / "data"
    environment = VLLM_ENVIRONMENT | {"WEFT_VLLM_REPLICAS": "2"}
    with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={tiny_model_dir}"], environment=environment) as process:
        yield Service(process, data, tiny_model_dir, make_tenant(data, "first"), make_tenant(data, "second"))


@pytest.fixture(scope="module")
def pair(service: Service) -> Iterator[tuple[Speaker, Speaker]]:
    """Two tenants; their words differ by their runs' random weights."""
    clients = [RawClient(service.base_url, key) for key in (service.key, service.other_key)]
    yield teach(clients[0], {MEOW: 2}), teach(clients[1], {MEOW: 4})
    for client in clients:
        client.close()


def server_of(service: Service, replica: str) -> psutil.Process:
    """The process of the server that the replica's log belongs to."""
    for child in psutil.Process(service.process.pid).children(recursive=True):
        is_server = "--served-model-name" in child.cmdline() and os.getpgid(child.pid) == child.pid
        if is_server and Path(os.readlink(f"/proc/{child.pid}/fd/2")).stem.endswith(f"-{replica}"):
            return child
    raise AssertionError(f"no server of {replica}")


def send_directive(service: Service, action: str, replica: str) -> None:
    """Send a replica directive by the admin command."""
    command = [sys.executable, "-m", "cli.main", "replica", action, replica, "--base", BASE_NAME]
    subprocess.run([*command, "--data", str(service.data)], check=True, capture_output=True)


def sampled_on(speaker: Speaker, replica: str) -> list[int]:
    """Return a whole sample drawn on ``replica``: try new sessions until the other replica follows its directive."""
    deadline = time.monotonic() + RESTART_SECONDS
    for number in itertools.count(1000):
        stream = speaker.stream(sampler=speaker.pinned(MEOW, number))
        tokens: list[int] = speaker.client.wait(stream.request_id, seconds=RESTART_SECONDS).json()["sequences"][0][
            "tokens"
        ]
        if speaker.report(stream)["replicas"] == [replica]:
            return tokens
        if time.monotonic() > deadline:
            break
    raise AssertionError(f"{replica} takes no work")


def test_a_replica_killed_mid_stream_loses_nothing_and_comes_back(
    service: Service, pair: tuple[Speaker, Speaker]
) -> None:
    expected = [speaker.uncut(MEOW) for speaker in pair]
    streams = [[speaker.stream(sampler=speaker.pinned(MEOW, 200 + n)) for n in range(4)] for speaker in pair]
    for stream in (*streams[0], *streams[1]):
        stream.until_tokens(5)
    victim = next(iter(pair[0].gate()["versions"]))
    os.killpg(server_of(service, victim).pid, signal.SIGKILL)
    moved = 0
    for speaker, tokens, mine in zip(pair, expected, streams, strict=True):
        for stream in mine:
            assert stream.finish()["sequences"][0]["tokens"] == tokens
            report = speaker.report(stream)
            moved += report["replicas"][0] == victim
            assert (report["attempts"] > 1) == (report["replicas"][0] == victim)
            assert report["replicas"][-1] != victim
    assert moved
    # Started again it knows no adapter, and gets each at its first sample; with the other drained, all come to it.
    (other,) = {"vllm-0", "vllm-1"} - {victim}
    send_directive(service, "drain", other)
    for speaker, tokens in zip(pair, expected, strict=True):
        assert sampled_on(speaker, victim) == tokens
    send_directive(service, "work", other)
