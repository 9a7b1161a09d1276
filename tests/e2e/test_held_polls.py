"""Hundreds of samples that one SDK client waits for, beside another tenant: with a poll for each, or with one for all."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testing.service_process import ServiceProcess
from tests.e2e.conftest import BASE_NAME, SDK_FOLDERS, Service, make_tenant
from tests.e2e.raw_client import RawClient
from tests.e2e.running_samples import rows, until

MANY = Path(__file__).with_name("sdk_many_samples.py")
SAMPLES = 300
POLLS = "SELECT told_as FROM operations WHERE kind = 'sample' AND lane LIKE ? || '%' AND told_as IS NOT NULL"


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory, service: Service) -> Iterator[Service]:
    """Another service on the same base, whose SDK clients poll for all their samples at once."""
    data = tmp_path_factory.mktemp("joint") / "data"
    environment = {"WEFT_SDK_JOINT_POLLS": "true"}
    base_models = [f"{BASE_NAME}={service.model}"]
    with ServiceProcess(data=data, base_models=base_models, environment=environment) as process:
        keys = {name: make_tenant(data, name) for name in ("first", "second")}
        yield replace(service, process=process, data=data, key=keys["first"], other_key=keys["second"])


def test_hundreds_of_held_polls_lose_no_sample_and_hold_up_no_other_tenant(service: Service) -> None:
    """The samples wait behind their own tenant's pause. The neighbour draws meanwhile."""
    session = wait_for_many(service)
    # The copy of the client asked for a number, so that both have seq_ids of their own.
    assert rows(service, "SELECT copies FROM samplers WHERE session_id = ? AND copies > 0", session) == [(1,)]
    assert rows(service, POLLS, session) == []


@pytest.mark.parametrize("sdk", [None, "0.34.0", "0.26.2"], ids=["0.38.0", "0.34.0", "0.26.2"])
def test_one_poll_for_hundreds_of_samples_loses_none_of_them(joint: Service, sdk: str | None) -> None:
    """The client and its copy have a poll each; both wait for their own samples. The neighbour draws meanwhile."""
    session = wait_for_many(joint, sdk)
    assert len({number for (number,) in rows(joint, POLLS, session)}) == SAMPLES


def wait_for_many(service: Service, sdk: str | None = None) -> str:
    """Have an SDK client send samples behind a pause, end the pause once all are accepted, and return its session."""
    mine, other = (RawClient(service.base_url, key) for key in (service.key, service.other_key))
    command = [sys.executable, str(MANY), service.base_url, service.key, BASE_NAME, str(SAMPLES)]
    environment = {**os.environ, "TINKER_TELEMETRY": "0"}
    if sdk is not None:
        environment["PYTHONPATH"] = str(SDK_FOLDERS / f"tinker-{sdk}")
    waiting = "SELECT 1 FROM operations WHERE kind = 'sample' AND state = 'pending' AND lane LIKE ? || '%'"
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        run = process.stdout.readline().strip()
        session = run.partition(":")[0]
        paused = mine.post(f"/adapters/{run}/pause", mode="keep")
        assert paused.status_code == 200, paused.text
        process.stdin.write("go\n")
        process.stdin.flush()
        until(lambda: len(rows(service, waiting, session)) == SAMPLES, "not every sample was accepted")
        draw(other, 5)
        resumed = mine.post(f"/adapters/{run}/resume")
        assert resumed.status_code == 200, resumed.text
        out, _ = process.communicate(timeout=300)
    assert out.strip() == str(SAMPLES)
    for client in (mine, other):
        client.close()
    return session


def draw(client: RawClient, count: int) -> None:
    """Draw samples of the bare base one after another, each to its end."""
    opened = client.post(
        "/create_sampling_session", session_id=client.session(), sampling_session_seq_id=0, base_model=BASE_NAME
    )
    for number in range(count):
        promise = client.post(
            "/asample",
            sampling_session_id=opened.json()["sampling_session_id"],
            seq_id=number,
            num_samples=1,
            prompt={"chunks": [{"tokens": [72, 101]}]},
            sampling_params={"max_tokens": 4, "stop": [], "seed": number},
        )
        assert promise.status_code == 200, promise.text
        assert len(client.result(promise)["sequences"][0]["tokens"]) == 4
