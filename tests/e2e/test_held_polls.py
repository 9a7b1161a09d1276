"""Hundreds of polls that one SDK client holds, each with a connection, beside another tenant."""

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.raw_client import RawClient
from tests.e2e.running_samples import rows, until

MANY = Path(__file__).with_name("sdk_many_samples.py")
SAMPLES = 300


def test_hundreds_of_held_polls_lose_no_sample_and_hold_up_no_other_tenant(service: Service) -> None:
    """The samples wait behind their own tenant's pause. The neighbour draws meanwhile."""
    mine, other = (RawClient(service.base_url, key) for key in (service.key, service.other_key))
    command = [sys.executable, str(MANY), service.base_url, service.key, BASE_NAME, str(SAMPLES)]
    environment = {**os.environ, "TINKER_TELEMETRY": "0"}
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
    # The copy of the client asked for a number, so that both have seq_ids of their own.
    assert rows(service, "SELECT copies FROM samplers WHERE session_id = ? AND copies > 0", session) == [(1,)]
    for client in (mine, other):
        client.close()


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
