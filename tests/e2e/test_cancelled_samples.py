"""Samples that nobody waits for any more leave the replica at once, and their tokens so far are counted."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.raw_client import RawClient
from tests.e2e.running_samples import rows
from tests.e2e.sample_stream import DEADLINE_SECONDS, SampleStream

CANCELLING = Path(__file__).with_name("sdk_cancelling.py")
LONG = 2000
PROMPT = [72, 101]


@pytest.fixture(scope="module")
def clients(service: Service) -> Iterator[tuple[RawClient, RawClient]]:
    """Two tenants."""
    pair = RawClient(service.base_url, service.key), RawClient(service.base_url, service.other_key)
    yield pair
    for client in pair:
        client.close()


def stream(client: RawClient, *, tokens: int, n: int = 1) -> SampleStream:
    """A streamed sample of the bare base, from a session of its own."""
    opened = client.post(
        "/create_sampling_session", session_id=client.session(), sampling_session_seq_id=0, base_model=BASE_NAME
    )
    body = {
        "sampling_session_id": opened.json()["sampling_session_id"],
        "seq_id": 0,
        "num_samples": n,
        "prompt": {"chunks": [{"tokens": PROMPT}]},
        "sampling_params": {"max_tokens": tokens, "stop": [], "seed": 3},
    }
    return SampleStream(client.base_url, client.key, body).start()


def until(service: Service, query: str, *values: object) -> tuple[object, ...]:
    """Ask the database until there is an answer."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := rows(service, query, *values)):
        assert time.monotonic() < deadline, query
    return found[0]


def test_a_cancelled_sample_leaves_the_replica_and_its_tokens_are_counted(
    service: Service, clients: tuple[RawClient, RawClient]
) -> None:
    cat, dog = clients
    beside = stream(dog, tokens=40)
    alone = beside.finish()["sequences"][0]["tokens"]
    long, beside = stream(cat, tokens=LONG, n=8).until_tokens(5), stream(dog, tokens=40).until_tokens(1)
    assert cat.post("/cancel_future", request_id=long.request_id).status_code == 204
    while (event := long.next_event()).name == "tokens":
        pass
    assert (event.name, event.data["code"]) == ("error", "cancelled")
    # The pool says what it had drawn once the replica has let go of it.
    (drawn,) = until(service, "SELECT tokens FROM operations WHERE id = ? AND tokens > 0", long.request_id)
    assert len(PROMPT) + 5 <= int(str(drawn)) < 8 * LONG
    assert rows(service, "SELECT * FROM samples_in_flight WHERE operation_id = ?", long.request_id) == []
    assert beside.finish()["sequences"][0]["tokens"] == alone


def test_the_sdk_cancels_a_sample_that_is_abandoned(service: Service, clients: tuple[RawClient, RawClient]) -> None:
    command = [sys.executable, str(CANCELLING), service.base_url, service.key, BASE_NAME, str(LONG)]
    environment = {**os.environ, "TINKER_TELEMETRY": "0"}
    (before,) = rows(service, "SELECT COALESCE(MAX(position), 0) FROM operations")[0]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        beside = stream(clients[1], tokens=20)
        ended = "SELECT error_message FROM operations WHERE position > ? AND error_code = 'cancelled'"
        (message,) = until(service, ended, before)
        process.communicate(timeout=DEADLINE_SECONDS)
    assert message == "cancelled by the client that sent it"
    beside.finish()
