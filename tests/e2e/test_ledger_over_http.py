"""Promises of the ledger, seen from outside: order by seq_id, repeats, conflicts, restarts and kills."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.service_process import ServiceProcess
from tests.e2e.conftest import BASE_NAME, Service, make_tenant
from tests.e2e.raw_client import RawClient, pass_message

TOKENS = [72, 101, 108, 108, 111]
ROUNDING = 4e-7
"""Relative difference of a loss that is computed beside other rows, by the page of fairness."""


@pytest.fixture
def client(service: Service) -> Iterator[RawClient]:
    """The first tenant."""
    raw = RawClient(service.base_url, service.key)
    yield raw
    raw.close()


@pytest.fixture
def other(service: Service) -> Iterator[RawClient]:
    """The second tenant."""
    raw = RawClient(service.base_url, service.other_key)
    yield raw
    raw.close()


def losses(client: RawClient, model: str, *, first: int, steps: int) -> list[float]:
    """Loss before each of ``steps`` steps, from seq_id ``first`` on."""
    found = []
    for number in range(steps):
        computed = client.passes(pass_message(model, first + 2 * number, TOKENS))
        client.step(model, first + 2 * number + 1, learning_rate=1e-3)
        found.append(client.result(computed)["metrics"]["loss:sum"])
    return found


def curve(client: RawClient, model: str) -> list[float]:
    """Losses of the run's points, which are numbered without gaps."""
    points = client.points(model)
    assert [one["step"] for one in points] == list(range(1, len(points) + 1))
    return [one["loss_sum"] for one in points]


def test_order_is_seq_id_whatever_the_arrival(client: RawClient, other: RawClient) -> None:
    in_order, reversed_order, neighbour = client.model(BASE_NAME), client.model(BASE_NAME), other.model(BASE_NAME)
    expected = losses(client, in_order, first=1, steps=3)
    promises = {}
    for seq_id in (6, 5, 4, 3, 2, 1):
        if seq_id % 2:
            promises[seq_id] = client.passes(pass_message(reversed_order, seq_id, TOKENS))
        else:
            promises[seq_id] = client.step(reversed_order, seq_id, learning_rate=1e-3)
        if seq_id == 3:
            assert losses(other, neighbour, first=1, steps=1) == expected[:1]
    got = [client.result(promises[seq_id])["metrics"]["loss:sum"] for seq_id in (1, 3, 5)]
    assert got == expected


def test_repeated_post_returns_the_same_request_and_acts_once(client: RawClient) -> None:
    once, twice = client.model(BASE_NAME), client.model(BASE_NAME)
    expected = losses(client, once, first=1, steps=2)
    for seq_id in (1, 3):
        message = pass_message(twice, seq_id, TOKENS)
        ids = {client.passes(message).json()["request_id"] for _ in range(3)}
        ids_of_step = {client.step(twice, seq_id + 1, learning_rate=1e-3).json()["request_id"] for _ in range(3)}
        assert len(ids) == len(ids_of_step) == 1
        assert client.wait(ids.pop()).json()["metrics"]["loss:sum"] == expected[(seq_id - 1) // 2]


def test_same_seq_id_with_another_body_is_a_conflict(client: RawClient) -> None:
    model = client.model(BASE_NAME)
    first = client.step(model, 1, learning_rate=1e-3)
    conflict = client.step(model, 1, learning_rate=2e-3)
    assert conflict.status_code == 400
    assert conflict.json()["code"] == "sequence_conflict"
    assert "error" not in client.result(first)


def test_rejected_request_uses_its_seq_id_up(client: RawClient) -> None:
    model = client.model(BASE_NAME)
    bad = client.passes(pass_message(model, 1, TOKENS, loss="no_such_loss"))
    good = client.passes(pass_message(model, 2, TOKENS))
    refused = client.result(bad)
    assert refused["category"] == "user"
    assert "no_such_loss" in refused["error"]
    assert client.result(good)["metrics"]["loss:sum"] > 0
    again = client.passes(pass_message(model, 1, TOKENS, loss="no_such_loss"))
    assert again.json()["request_id"] == bad.json()["request_id"]


def test_unloaded_model_takes_no_more_work_and_answers_old_requests(client: RawClient) -> None:
    model, kept = client.model(BASE_NAME), client.model(BASE_NAME)
    step = client.step(model, 1)
    unload = client.post("/unload_model", model_id=model)
    assert client.result(unload)["model_id"] == model
    assert client.step(model, 1).json()["request_id"] == step.json()["request_id"]
    refused = client.step(model, 2)
    assert (refused.status_code, refused.json()["code"]) == (400, "run_unloaded")
    assert "error" not in client.result(client.step(kept, 1))


def test_ended_session_takes_no_more_work(client: RawClient) -> None:
    session = client.session()
    model = client.model(BASE_NAME, session)
    assert client.post(f"/sessions/{session}/finish", reason={"type": "success"}).status_code in (200, 204)
    for refused in (
        client.step(model, 1),
        client.post("/create_model", session_id=session, model_seq_id=5, base_model=BASE_NAME),
        client.post("/create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=BASE_NAME),
    ):
        assert (refused.status_code, refused.json()["code"]) == (400, "session_ended")


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Service]:
    """The service that these tests end and start again, with keys of two tenants."""
    data = tmp_path_factory.mktemp("mortal") / "data"
    with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={tiny_model_dir}"]) as process:
        yield Service(process, data, tiny_model_dir, make_tenant(data, "first"), make_tenant(data, "other"))


class TestRestart:
    """A service of its own, ended in two ways; the undisturbed run is the reference."""

    @pytest.mark.parametrize("is_killed", [False, True], ids=["ctrl-c", "kill-9"])
    def test_training_goes_on_as_if_nothing_had_happened(self, mortal: Service, is_killed: bool) -> None:
        process = mortal.process
        client, other = RawClient(process.base_url, mortal.key), RawClient(process.base_url, mortal.other_key)
        undisturbed, restarted, neighbour = client.model(BASE_NAME), client.model(BASE_NAME), other.model(BASE_NAME)
        expected = losses(client, undisturbed, first=1, steps=6)
        assert losses(client, restarted, first=1, steps=2) == expected[:2]
        saved = client.result(client.post("/save_weights", model_id=restarted, seq_id=5, path="saved"))
        assert saved["path"].endswith("/weights/saved")
        part = losses(client, restarted, first=6, steps=1)
        assert part == expected[2:3]
        assert losses(other, neighbour, first=1, steps=2) == expected[:2]
        early = client.passes(pass_message(restarted, 9, TOKENS)).json()["request_id"]
        if is_killed:
            process.kill()
        else:
            assert process.stop() == 0

        process.start()
        client.base_url = other.base_url = process.base_url
        for raw in (client, other):
            raw.close()
            raw.__post_init__()
        second = client.passes(pass_message(restarted, 8, TOKENS))
        assert client.result(second)["metrics"]["loss:sum"] > 0
        late = client.wait(early).json()["metrics"]["loss:sum"]
        last = client.result(client.step(restarted, 10, learning_rate=1e-3))
        assert losses(other, neighbour, first=5, steps=2) == expected[2:4]
        # The passes at 8 and 9 come before one step and compute the same loss, two rows at once, which may round otherwise.
        both = [client.result(second)["metrics"]["loss:sum"], late]
        assert both == pytest.approx([expected[3]] * 2, rel=ROUNDING)
        assert curve(client, restarted) == [*expected[:3], pytest.approx(sum(both), rel=ROUNDING)]
        assert client.points(restarted)[-1]["grad_norm"] == last["metrics"]["grad_norm:max"]
        assert curve(client, undisturbed) == expected
        for raw in (client, other):
            raw.close()

    def test_accepted_work_and_results_survive(self, mortal: Service) -> None:
        process = mortal.process
        client = RawClient(process.base_url, mortal.key)
        model = client.model(BASE_NAME)
        finished = client.passes(pass_message(model, 1, TOKENS)).json()["request_id"]
        before = client.wait(finished).json()
        accepted = [client.step(model, seq_id).json()["request_id"] for seq_id in range(2, 40)]
        process.kill()
        process.start()
        client.close()
        client = RawClient(process.base_url, mortal.key)
        assert client.wait(finished).json() == before
        assert all("error" not in client.wait(request_id).json() for request_id in accepted)
        client.close()
