"""Hundreds of samples that one SDK client waits for, beside another tenant: with a poll for each, or with one for all."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from testing.service_process import ServiceProcess
from tests.e2e.conftest import BASE_NAME, SDK_FOLDERS, Service, make_tenant
from tests.e2e.raw_client import RawClient
from tests.e2e.running_samples import rows, until
from tests.e2e.test_observability import free_port

MANY = Path(__file__).with_name("sdk_many_samples.py")
SAMPLES = 300
FEW_SAMPLES = 60
FEW_POLLS = 8
"""Polls that a tenant may have held, of a service that is to tell clients to poll again."""
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


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, service: Service) -> Iterator[tuple[Service, str]]:
    """A service that holds few polls of a tenant, and the address of its metrics."""
    data, port = tmp_path_factory.mktemp("crowded") / "data", free_port()
    environment = {"WEFT_TENANT_POLLS": str(FEW_POLLS), "WEFT_METRICS_PORT": str(port)}
    with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={service.model}"], environment=environment) as process:
        keys = {name: make_tenant(data, name) for name in ("first", "second")}
        found = replace(service, process=process, data=data, key=keys["first"], other_key=keys["second"])
        yield found, f"http://127.0.0.1:{port}/metrics"


def answered_polls(metrics: str) -> dict[str, int]:
    """Return how many polls were answered, by status."""
    lines = httpx.get(metrics, timeout=60).raise_for_status().text.splitlines()
    polls = [line for line in lines if line.startswith("weft_http_requests_total{") and "/retrieve_future" in line]
    return {line.partition('status="')[2][:3]: int(float(line.rpartition(" ")[2])) for line in polls}


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


@pytest.mark.parametrize("sdk", ["0.6.3", "0.18.2", None], ids=["0.6.3", "0.18.2", "0.38.0"])
def test_polls_beyond_a_tenants_places_cost_no_sdk_a_result(crowded: tuple[Service, str], sdk: str | None) -> None:
    """Nearly all samples wait without a place. The neighbour draws meanwhile."""
    service, metrics = crowded

    def told() -> int:
        return answered_polls(metrics).get("408", 0)

    before = told()
    wait_for_many(
        service,
        sdk,
        FEW_SAMPLES,
        lambda: until(lambda: told() - before > FEW_SAMPLES, "polls were not told to come again"),
    )
    assert set(answered_polls(metrics)) <= {"200", "408"}


def wait_for_many(
    service: Service, sdk: str | None = None, count: int = SAMPLES, meanwhile: Callable[[], None] = lambda: None
) -> str:
    """Have an SDK client send samples behind a pause, end the pause once all are accepted, and return its session."""
    mine, other = (RawClient(service.base_url, key) for key in (service.key, service.other_key))
    command = [sys.executable, str(MANY), service.base_url, service.key, BASE_NAME, str(count)]
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
        until(lambda: len(rows(service, waiting, session)) == count, "not every sample was accepted")
        draw(other, 5)
        meanwhile()
        resumed = mine.post(f"/adapters/{run}/resume")
        assert resumed.status_code == 200, resumed.text
        out, _ = process.communicate(timeout=300)
    assert out.strip() == str(count)
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
