"""A sample tells why it waits: a pause, no room, a drain. A second tenant's is drawn meanwhile."""

from collections.abc import Iterator

import pytest
from weft_client.models import WaitingInfo
from weft_client.synchronous import Weft

from testing.operator_command import weft as command
from tests.e2e.conftest import BASE_NAME, POOL_SAMPLES, Service
from tests.e2e.raw_client import RawClient
from tests.e2e.running_samples import until
from tests.e2e.speaker import Speaker

LONG = 900
REPLICA = f"torch:{BASE_NAME}"
"""Replica in the service's own process."""


@pytest.fixture
def pair(service: Service) -> Iterator[tuple[Speaker, Speaker]]:
    """Two tenants that sample the bare base; the first has a run with a version as well."""
    clients = [RawClient(service.base_url, key) for key in (service.key, service.other_key)]
    speakers = []
    for client in clients:
        opened = client.post(
            "/create_sampling_session", session_id=client.session(), sampling_session_seq_id=0, base_model=BASE_NAME
        )
        speakers.append(Speaker(client, "", opened.json()["sampling_session_id"], {}))
    yield speakers[0], speakers[1]
    for client in clients:
        client.close()


def wait_of(service: Service, speaker: Speaker, request: str) -> WaitingInfo:
    """Ask why the tenant's sample waits."""
    with Weft(service.base_url, speaker.client.key) as weft:
        return weft.samples.waiting(request)


def test_samples_beyond_the_room_say_so_and_a_neighbours_is_drawn(
    service: Service, pair: tuple[Speaker, Speaker]
) -> None:
    cat, cow = pair
    flood = [cat.send(tokens=LONG) for _ in range(POOL_SAMPLES + 8)]
    try:
        until(lambda: wait_of(service, cat, flood[-1]).reason == "no_room", "the pool is full")
        assert wait_of(service, cat, flood[0]).reason == "running"
        last = wait_of(service, cat, flood[-1])
        assert last.ahead is not None
        assert last.ahead.own_operations >= 1
        assert (last.ahead.other_operations, last.ahead.bound_tokens) == (0, 0)
        mine = cow.send(tokens=LONG)
        until(lambda: wait_of(service, cow, mine).reason in ("running", None), "the neighbour's is drawn")
        cow.client.post("/cancel_future", request_id=mine)
    finally:
        for request in flood:
            cat.client.post("/cancel_future", request_id=request)
    assert wait_of(service, cat, flood[-1]).reason is None


def test_a_sample_behind_a_pause_says_so_and_one_that_is_drawn_goes_on(
    service: Service, pair: tuple[Speaker, Speaker]
) -> None:
    """The gate is that of the base, which the operator closes."""
    cat, cow = pair
    beside = cow.stream(tokens=LONG).until_tokens(3)
    command(service.data, "gate", "pause", "--pool", BASE_NAME, "--mode", "wait", "--reason", "a test")
    try:
        request = cat.send(tokens=4)
        until(lambda: wait_of(service, cat, request).reason == "gate_paused", "the pause is told")
        found = wait_of(service, cat, request)
        assert found.until is not None
        assert "a test" in (found.text or "")
        assert wait_of(service, cow, beside.request_id).reason in ("running", None)
    finally:
        command(service.data, "gate", "resume", "--pool", BASE_NAME)
    assert cat.client.wait(request).json()["sequences"]
    beside.finish()


def test_a_sample_of_a_drained_base_says_so_and_one_that_is_drawn_goes_on(
    service: Service, pair: tuple[Speaker, Speaker]
) -> None:
    cat, cow = pair
    beside = cow.stream(tokens=LONG).until_tokens(3)
    command(service.data, "replica", "drain", REPLICA, "--base", BASE_NAME)
    try:
        until(lambda: wait_of(service, cat, cat.send(tokens=4)).reason == "drained", "the drain is told")
        request = cat.send(tokens=4)
        assert wait_of(service, cow, beside.request_id).reason in ("running", None)
    finally:
        command(service.data, "replica", "work", REPLICA, "--base", BASE_NAME)
    assert cat.client.wait(request).json()["sequences"]
    beside.finish()
