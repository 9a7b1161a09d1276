"""An operator's commands on a running service take effect within seconds, and a second tenant notices nothing."""

import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from testing.operator_command import weft
from testing.tenants import make_tenants
from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.raw_client import RawClient, pass_message

SECONDS = 60.0
TOKENS = [72, 101, 108, 108, 111]
LONG = 400


class Client(RawClient):
    """A tenant of a name, with a model."""

    def __init__(self, service: Service, name: str, key: str) -> None:
        super().__init__(service.base_url, key)
        self.name = name
        self.session_id = self.session()
        self.run = self.model(BASE_NAME, self.session_id)
        self.sampler: str | None = None

    def trains(self, seq_id: int) -> float:
        """Make a step from ``seq_id`` on; return the loss before it."""
        computed = self.passes(pass_message(self.run, seq_id, TOKENS))
        self.result(self.step(self.run, seq_id + 1, learning_rate=1e-3))
        loss: float = self.result(computed)["metrics"]["loss:sum"]
        return loss

    def samples(self, seq_id: int, tokens: int) -> httpx.Response:
        """POST a greedy sample of the bare base; return the promise."""
        if self.sampler is None:
            made = self.post(
                "/create_sampling_session", session_id=self.session_id, sampling_session_seq_id=0, base_model=BASE_NAME
            )
            self.sampler = made.json()["sampling_session_id"]
        asked = {"sampling_session_id": self.sampler, "seq_id": seq_id, "num_samples": 1}
        prompt = {"chunks": [{"tokens": TOKENS}]}
        params = {"max_tokens": tokens, "temperature": 0.0, "stop": []}
        answer = self.post("/asample", **asked, prompt=prompt, sampling_params=params)
        assert answer.status_code == 200, answer.text
        return answer


@pytest.fixture
def pair(service: Service) -> Iterator[tuple[Client, Client]]:
    """A tenant that an operator acts on, and a neighbour."""
    names = [f"{name}-{uuid.uuid4().hex[:8]}" for name in ("treated", "neighbour")]
    clients = [Client(service, name, key) for name, key in zip(names, make_tenants(service.data, names), strict=True)]
    assert clients[0].trains(1) == clients[1].trains(1)
    yield clients[0], clients[1]
    for client in clients:
        client.close()


def until(holds: Callable[[], Any], what: str) -> None:
    """Wait until ``holds``."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def test_a_suspended_tenants_work_waits_with_a_reason_and_goes_on(
    service: Service, pair: tuple[Client, Client]
) -> None:
    treated, neighbour = pair
    weft(service.data, "tenant", "suspend", treated.name, "--reason", "unpaid")
    promise = treated.passes(pass_message(treated.run, 3, TOKENS))
    assert promise.status_code == 200
    assert treated.session() != treated.session_id
    expected = neighbour.trains(3)
    listed = weft(service.data, "operation", "list", "--tenant", treated.name)
    assert "held: this tenant's work is suspended: unpaid" in listed
    assert neighbour.name not in listed
    weft(service.data, "tenant", "resume", treated.name)
    assert treated.result(promise)["metrics"]["loss:sum"] == expected


def test_a_suspended_tenants_samples_are_cut_and_go_on(service: Service, pair: tuple[Client, Client]) -> None:
    treated, neighbour = pair
    expected = neighbour.result(neighbour.samples(0, LONG))
    begun = treated.samples(0, LONG)
    show = ("operation", "show", begun.json()["request_id"])
    until(
        lambda: "waits\trunning" in weft(service.data, *show) or "done" in weft(service.data, *show), "it is not drawn"
    )
    weft(service.data, "tenant", "suspend", treated.name, "--reason", "unpaid")
    waiting = treated.samples(1, 8)
    until(lambda: not in_flight(service, treated.name), "a replica draws on")
    neighbour.result(neighbour.samples(1, 8))
    listed = weft(service.data, "operation", "list", "--tenant", treated.name, "--kind", "sample")
    assert "held: " in listed
    weft(service.data, "tenant", "resume", treated.name)
    (drawn,), (uncut,) = treated.result(begun)["sequences"], expected["sequences"]
    assert drawn["tokens"] == uncut["tokens"]
    assert drawn["logprobs"] == pytest.approx(uncut["logprobs"], abs=1e-4)
    assert len(treated.result(waiting)["sequences"][0]["tokens"]) == 8


def in_flight(service: Service, tenant: str) -> int:
    """Return how many of the tenant's samples a replica draws."""
    query = "SELECT count(*) FROM samples_in_flight s JOIN tenants t ON t.id = s.tenant_id WHERE t.name = ?"
    with closing(sqlite3.connect(service.data / "weft.db")) as database:
        ((found,),) = database.execute(query, [tenant]).fetchall()
    return int(found)


def test_operations_are_shown_ended_and_begun_anew(service: Service, pair: tuple[Client, Client]) -> None:
    treated, neighbour = pair
    ahead = [treated.passes(pass_message(treated.run, seq_id, TOKENS)).json()["request_id"] for seq_id in (4, 5)]
    assert "missing_seq_id: seq_id 3 of this model has not come" in weft(
        service.data, "operation", "list", "--run", treated.run
    )
    assert f"tenant\t{treated.name}" in weft(service.data, "operation", "show", ahead[0])
    weft(service.data, "operation", "requeue", ahead[0])
    weft(service.data, "operation", "cancel", ahead[0], "--reason", "wrong data")
    weft(service.data, "operation", "fail", ahead[1])
    computed = treated.passes(pass_message(treated.run, 3, TOKENS))
    errors = [treated.wait(one).json() for one in ahead]
    assert [error["category"] for error in errors] == ["user", "server"]
    assert "wrong data" in errors[0]["error"]
    with pytest.raises(RuntimeError, match="it is failed"):
        weft(service.data, "operation", "cancel", ahead[0])
    loss = treated.result(computed)["metrics"]["loss:sum"]
    treated.result(treated.step(treated.run, 6, learning_rate=1e-3))
    # One gradient and one step, as the neighbour makes: the ended operations have left nothing.
    assert loss == neighbour.trains(3)
    assert treated.trains(7) == neighbour.trains(5)


def test_a_run_is_shown_with_its_history_and_evicted(service: Service, pair: tuple[Client, Client]) -> None:
    treated, neighbour = pair
    assert "\tclaimed\ttrainer-" in weft(service.data, "run", "show", treated.run)
    weft(service.data, "run", "evict", treated.run)
    until(lambda: "\tevicted\t" in weft(service.data, "run", "show", treated.run), "the adapter is not on disk")
    assert treated.trains(3) == neighbour.trains(3)
    assert "evicted" not in weft(service.data, "run", "show", neighbour.run)
    (line,) = weft(service.data, "trainer", "list").splitlines()
    assert line.split("\t")[3] == "works"
    with pytest.raises(RuntimeError, match="no run"):
        weft(service.data, "run", "evict", "nothing")


def test_a_session_is_ended_with_what_it_has_pending(service: Service, pair: tuple[Client, Client]) -> None:
    treated, neighbour = pair
    ahead = treated.passes(pass_message(treated.run, 4, TOKENS)).json()["request_id"]
    ended = weft(service.data, "session", "end", treated.session_id, "--reason", "maintenance")
    assert ended.endswith("1 operation cancelled\n")
    assert "maintenance" in treated.wait(ahead).json()["error"]
    assert treated.post("/session_heartbeat", session_id=treated.session_id).status_code == 410
    assert neighbour.post("/session_heartbeat", session_id=neighbour.session_id).status_code == 200
    neighbour.trains(3)
