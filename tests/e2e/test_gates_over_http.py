"""Pause, swap, resume and cancellation through real HTTP, while a second tenant's adapter samples throughout."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cli.administration import on_database
from store.settings import Settings
from testing.operator_command import weft
from testing.service_process import ServiceProcess
from testing.tenants import end_key, new_key
from tests.e2e.conftest import BASE_NAME, POOL_SAMPLES, Service
from tests.e2e.raw_client import RawClient
from tests.e2e.running_samples import rows, running, until
from tests.e2e.sample_stream import SampleStream
from tests.e2e.speaker import BARK, LONG, LOWS, MEOW, PROMPT, TAUGHT, TRIES, Speaker, teach, text

BESIDE = 300
SEQUENCES = (1, 3)
"""Sequences of samples that are cut together."""
ENDLESS = 950
"""Tokens of a sample that is ended long before."""


def operator(service: Service, action: str, *options: str) -> None:
    """Change the gate of the whole pool by the admin command."""
    weft(service.data, "gate", action, "--pool", BASE_NAME, *options)


@pytest.fixture(scope="module")
def pair(either: Service) -> Iterator[tuple[Speaker, Speaker]]:
    """One that says meow or bark, and another tenant's that lows."""
    clients = [RawClient(either.base_url, key) for key in (either.key, either.other_key)]
    yield teach(clients[0], {MEOW: 25, BARK: 30}), teach(clients[1], {LOWS: 25})
    for client in clients:
        client.close()


@pytest.fixture
def cat(pair: tuple[Speaker, Speaker]) -> Iterator[Speaker]:
    """Says meow, open."""
    pair[0].says(MEOW)
    yield pair[0]
    pair[0].gate("resume")


@pytest.fixture
def cow(pair: tuple[Speaker, Speaker]) -> Speaker:
    """The other tenant's, which must not be disturbed."""
    return pair[1]


def test_pausing_one_adapter_keeps_its_samples_and_leaves_the_other_tenants_untouched(
    cat: Speaker, cow: Speaker
) -> None:
    """A pause that names no mode keeps. New samples of the paused adapter wait, those of its neighbour do not."""
    expected, other = cat.uncut(MEOW), cow.uncut(LOWS)
    beside = cow.stream().until_tokens(5)
    mine, paused = cat.acted_on(lambda: cat.gate("pause", reason="a test"))
    assert (paused["mode"], paused["state"], paused["in_flight"], paused["reason"]) == ("keep", "paused", 0, "a test")
    waiting = cat.stream()
    assert cow.gate()["state"] == "open"
    assert cow.stream(tokens=20).finish()["sequences"][0]["tokens"] == other[:20]
    assert beside.finish()["sequences"][0]["tokens"] == other
    assert cow.report(beside)["attempts"] == 1
    assert cat.gate()["state"] == "paused"
    assert (mine.done, waiting.tokens, waiting.is_silent()) == (None, {}, True)
    cat.gate("resume")
    assert mine.finish()["sequences"][0]["tokens"] == waiting.finish()["sequences"][0]["tokens"] == expected
    assert cat.cuts(mine) == 1


def test_a_reload_without_a_path_follows_the_newest_version(cat: Speaker, cow: Speaker) -> None:
    other = cow.uncut(LOWS)
    newest = cat.says(BARK)
    beside = cow.stream().until_tokens(3)
    sample, made = cat.swapped(None)
    assert cat.report(sample)["max_version"] not in (cat.report(sample)["min_version"], newest)
    assert text(made).startswith("meow meow ")
    assert "bark bark bark" in text(made)[-20:]
    assert beside.finish()["sequences"][0]["tokens"] == other
    assert cow.report(beside)["attempts"] == 1


def test_four_are_cut_wait_and_finish_while_four_of_the_neighbour_go_on(cat: Speaker, cow: Speaker) -> None:
    expected, other = cat.uncut(MEOW), cow.uncut(LOWS)
    for _ in range(TRIES):
        mine, theirs = ([speaker.stream() for _ in range(4)] for speaker in (cat, cow))
        for stream in (*mine, *theirs):
            stream.until_tokens(3)
        assert cat.gate("pause", mode="keep")["in_flight"] == 0
        if not any(map(cat.has_ended, mine)):
            break
        # On a busy machine one may end before it is cut: then others are asked for.
        cat.gate("resume")
    for stream in theirs:
        assert stream.finish()["sequences"][0]["tokens"] == other
        assert cow.report(stream)["attempts"] == 1
    assert [stream.done for stream in mine] == [None] * 4
    cat.gate("resume")
    for stream in mine:
        made = stream.finish()["sequences"][0]
        assert (made["tokens"], made["stop_reason"]) == (expected, "length")
        assert cat.cuts(stream) == 1


def test_a_sample_that_spans_a_swap_reads_meow_then_bark(cat: Speaker, cow: Speaker) -> None:
    other = cow.uncut(LOWS)
    beside = cow.stream().until_tokens(3)
    pinned = cat.uncut(MEOW)
    sample, made = cat.swapped(BARK)
    assert cat.cuts(sample) == 1
    (spans,) = [sequence["spans"] for sequence in cat.report(sample)["sequences"]]
    assert sample.versions == [span["version"] for span in spans]
    old, new = sample.versions
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], TAUGHT)
    assert made[: spans[1]["start"]] == pinned[: spans[1]["start"]]
    assert text(made).startswith("meow meow ")
    assert "bark bark bark" in text(made)[-20:]
    report = cat.report(sample)
    assert (report["min_version"], report["max_version"]) == tuple(sorted((old, new), key=[old, new].index))
    assert beside.finish()["sequences"][0]["tokens"] == other
    assert cow.report(beside)["attempts"] == 1


def test_a_swap_is_told_of_what_is_in_flight(cat: Speaker, cow: Speaker) -> None:
    other = cow.uncut(LOWS)
    beside, sample = cow.stream(), cat.stream(tokens=ENDLESS).until_tokens(3)
    new = cat.says(BARK)
    cat.until_drawn_from(new)
    assert not any(new in versions for versions in cow.gate()["versions"].values())
    cat.client.post("/cancel_future", request_id=sample.request_id).raise_for_status()
    assert beside.finish()["sequences"][0]["tokens"] == other


def test_abort_gives_the_tokens_so_far_and_says_so(cat: Speaker, cow: Speaker) -> None:
    expected, other = cat.uncut(MEOW), cow.uncut(LOWS)
    beside = cow.stream().until_tokens(3)
    for _ in range(TRIES):
        mine = cat.stream(n=2).until_tokens(10)
        assert cat.gate("pause", mode="abort")["state"] == "paused"
        done = mine.finish()
        if any(len(sequence["tokens"]) < LONG for sequence in done["sequences"]):
            break
        cat.gate("resume")
    for sequence in done["sequences"]:
        assert sequence["stop_reason"] == "length"
        assert sequence["tokens"] == expected[: len(sequence["tokens"])]
    assert [one["stop_reason"] for one in cat.report(mine)["sequences"]] == ["abort", "abort"]
    assert beside.finish()["sequences"][0]["tokens"] == other


def test_wait_lets_samples_in_flight_end_and_holds_new_ones(cat: Speaker, cow: Speaker) -> None:
    expected = cat.uncut(MEOW)
    mine, pausing = cat.acted_on(lambda: cat.gate("pause", mode="wait", timeout_seconds=0))
    assert (pausing["state"], pausing["in_flight"]) == ("pausing", 1)
    assert mine.finish()["sequences"][0]["tokens"] == expected
    assert cat.report(mine)["attempts"] == 1
    assert cat.gate()["state"] == "paused"
    waiting = cat.stream()
    assert cow.stream(tokens=5).finish()
    assert waiting.is_silent()
    cat.gate("resume")
    assert waiting.finish()["sequences"][0]["tokens"] == expected


def cut(cat: Speaker, cuts: int) -> list[SampleStream]:
    """Return samples of one and of three sequences that were cut so often together.

    On a busy machine one may end before its cuts: then others are asked for.
    """
    for _ in range(10):
        samples = [cat.stream(n=n) for n in SEQUENCES]
        for number in range(1, cuts + 1):
            for sample in samples:
                sample.until_tokens(20 * number)
            # A pause that follows a resume too closely would find a sample still on its way back.
            while cat.gate()["in_flight"] < len(samples) and not any(map(cat.has_ended, samples)):
                continue
            cat.gate("pause", mode="keep")
            cat.gate("resume")
        for sample in samples:
            sample.finish()
        if [cat.cuts(sample) for sample in samples] == [cuts] * len(samples):
            return samples
    raise AssertionError("every time a sample ended before its cuts")


@pytest.mark.parametrize("cuts", [1, 2, 5])
def test_a_greedy_sample_cut_by_keep_equals_the_uncut_one(cat: Speaker, cow: Speaker, cuts: int) -> None:
    expected, other = cat.uncut(MEOW), cow.uncut(LOWS)
    beside, mine = cow.stream().until_tokens(1), cut(cat, cuts)
    for sample, n in zip(mine, SEQUENCES, strict=True):
        assert [sequence["tokens"] for sequence in sample.finish()["sequences"]] == [expected] * n
        assert [len(sequence["spans"]) for sequence in cat.report(sample)["sequences"]] == [1] * n
        assert cat.cuts(sample) == cuts
    assert beside.finish()["sequences"][0]["tokens"] == other
    assert cow.report(beside)["attempts"] == 1


def test_every_sampler_says_what_its_version_says(cat: Speaker, cow: Speaker) -> None:
    streams = [cat.stream(tokens=TAUGHT), cow.stream(tokens=TAUGHT), cat.stream(tokens=TAUGHT)]
    said = [text(stream.finish()["sequences"][0]["tokens"]) for stream in streams]
    assert (said[0], said[1][:15]) == (said[2], "lows lows lows ")
    assert said[0].startswith("meow meow meow ")
    version = cat.says(BARK)
    stream = cat.stream(tokens=TAUGHT)
    assert text(stream.finish()["sequences"][0]["tokens"]).startswith("bark bark ")
    assert cat.report(stream)["max_version"] == version
    assert text(cow.stream(tokens=TAUGHT).finish()["sequences"][0]["tokens"]) == said[1]


def test_a_checkpoint_is_deleted_at_once_while_a_sample_draws_from_it(cat: Speaker, cow: Speaker) -> None:
    client, expected = cat.client, cow.uncut(LOWS)
    run = client.model(BASE_NAME)
    saved = client.post("/save_weights_for_sampler", model_id=run, seq_id=1, path="short-lived")
    path = client.result(saved)["path"]
    brief = Speaker(client, run, f"{run.partition(':')[0]}:sample:0", {MEOW: path})
    sampler = brief.pinned(MEOW, 0)
    beside, mine = cow.stream(), brief.stream(n=2, tokens=2 * LONG).until_tokens(3)
    address = f"/training_runs/{run}/checkpoints/sampler_weights/short-lived"
    assert [client.http.delete(address).status_code for _ in range(2)] == [204, 204]
    assert brief.gate()["in_flight"] == 1, "the answer did not wait for the sample"
    assert cow.client.http.delete(address).status_code == 404
    refused = client.post("/asample", sampling_session_id=sampler, seq_id=9, prompt={"chunks": [{"tokens": [1]}]})
    assert (refused.status_code, refused.json()["code"]) == (404, "not_found")
    assert [len(sequence["tokens"]) for sequence in mine.finish()["sequences"]] == [2 * LONG] * 2
    assert brief.report(mine)["attempts"] == 1
    assert beside.finish()["sequences"][0]["tokens"] == expected


def test_a_pause_expires_by_itself(cat: Speaker, cow: Speaker) -> None:
    mine = cat.stream().until_tokens(3)
    assert cat.gate("pause", mode="keep", ttl_seconds=3)["state"] == "paused"
    late = cat.stream(tokens=3)
    for stream in (mine, late):
        assert stream.finish()["sequences"][0]["stop_reason"] == "length"
    assert cat.gate()["state"] == "open"


def test_a_strangers_adapter_is_not_found(cat: Speaker, cow: Speaker) -> None:
    for action in ("pause", "resume", "reload"):
        assert cow.client.post(f"/adapters/{cat.run}/{action}").status_code == 404
    assert cow.client.http.get(f"/adapters/{cat.run}").status_code == 404
    sample = cat.stream(tokens=3)
    sample.finish()
    assert cow.client.http.get(f"/samples/{sample.request_id}").status_code == 404
    assert cat.gate()["state"] == "open"


def test_two_controllers_at_once_each_know_what_they_hold(cat: Speaker, cow: Speaker) -> None:
    first = cat.gate("pause", mode="keep", reason="one")
    second = cat.gate("pause", mode="wait", reason="two")
    assert second["generation"] == first["generation"] + 1
    refused = cat.client.post(f"/adapters/{cat.run}/resume", generation=first["generation"])
    assert refused.status_code == 400
    assert "another controller" in refused.text
    assert cat.gate("resume", generation=second["generation"])["state"] == "open"
    assert cat.gate("resume")["state"] == "open"


def test_a_pool_wide_pause_and_resume_keeps_everything(either: Service, cat: Speaker, cow: Speaker) -> None:
    expected, other = cat.uncut(MEOW), cow.uncut(LOWS)
    streams = [cat.stream().until_tokens(5), cow.stream().until_tokens(5)]
    operator(either, "pause", "--mode", "keep", "--reason", "upkeep")
    try:
        late = cow.stream()
        for speaker in (cat, cow):
            speaker.until_in_flight(0)
        assert (streams[0].done, streams[1].done, late.tokens) == (None, None, {})
    finally:
        operator(either, "resume")
    streams.append(late)
    for stream, tokens in zip(streams, (expected, other, other), strict=True):
        assert stream.finish()["sequences"][0]["tokens"] == tokens


@pytest.fixture(scope="module")
def untaught(either: Service) -> Iterator[tuple[Speaker, Speaker]]:
    """A tenant with an adapter that has learned nothing, and another that samples the bare base."""
    clients = [RawClient(either.base_url, key) for key in (either.key, either.other_key)]
    opened = clients[1].post(
        "/create_sampling_session", session_id=clients[1].session(), sampling_session_seq_id=0, base_model=BASE_NAME
    )
    yield teach(clients[0], {MEOW: 1}), Speaker(clients[1], "", opened.json()["sampling_session_id"], {})
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def undisturbed(untaught: tuple[Speaker, Speaker]) -> list[int]:
    """Tokens of a sample of the bare base that nothing happens beside."""
    tokens: list[int] = untaught[1].stream(tokens=BESIDE).finish()["sequences"][0]["tokens"]
    return tokens


def test_a_paused_tenants_flood_leaves_the_pool_to_its_neighbour(untaught: tuple[Speaker, Speaker]) -> None:
    """The paused tenant has more samples pending than the pool holds."""
    paused, neighbour = untaught
    paused.gate("pause", mode="keep", reason="a test")
    flood = [paused.send(tokens=2) for _ in range(POOL_SAMPLES + 8)]
    assert len(neighbour.stream(tokens=5).finish()["sequences"][0]["tokens"]) == 5
    paused.gate("resume")
    for request_id in flood:
        assert len(paused.client.wait(request_id).json()["sequences"][0]["tokens"]) == 2


@pytest.mark.parametrize("how", ["cancel_future", "operator", "session", "key", "stream", "completion"])
def test_what_nobody_waits_for_leaves_the_replica_and_its_neighbour_goes_on(
    either: Service, untaught: tuple[Speaker, Speaker], undisturbed: list[int], how: str
) -> None:
    cat, cow = untaught
    with begun(either, cat, how) as cancel:
        until(lambda: running(either) == 1, "the sample is drawn")
        beside = cow.stream(tokens=BESIDE).until_tokens(3)
        assert running(either) == 2
        cancel()
        until(lambda: running(either) < 2, "it is drawn no longer")
    (newest,) = rows(either, "SELECT MAX(position) FROM operations WHERE id <> ?", beside.request_id)[0]
    ended = "SELECT error_code, tokens FROM operations WHERE position = ? AND tokens > 0"
    until(lambda: bool(rows(either, ended, newest)), "its tokens are counted")
    ((code, tokens),) = rows(either, ended, newest)
    assert (code, int(str(tokens)) < ENDLESS) == ("cancelled", True)
    assert beside.finish()["sequences"][0]["tokens"] == undisturbed
    assert cow.report(beside)["attempts"] == 1


@contextmanager
def begun(service: Service, cat: Speaker, how: str) -> Iterator[Callable[[], object]]:
    """Have a long sample drawn inside the block; yields what ends it in the way ``how``."""
    settings = Settings(data_dir=service.data)
    if how in ("stream", "completion"):
        # Greedy: another sample may come to an end-of-sequence token before it is left.
        asked = {"model": cat.run, "prompt": PROMPT, "max_tokens": ENDLESS, "temperature": 0, "stream": how == "stream"}
        body = json.dumps(asked)
        host = service.base_url.removeprefix("http://")
        lines = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {host}",
            f"X-API-Key: {cat.client.key}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        address, _, port = host.partition(":")
        with socket.create_connection((address, int(port))) as connection:
            connection.sendall("\r\n".join([*lines, "", body]).encode())
            yield connection.close
        return
    if how == "key":
        secret = on_database(settings, lambda database: new_key(database, "first"))
        other = RawClient(service.base_url, secret)
        other.post("/asample", **cat.body(tokens=ENDLESS, sampler=cat.sampler))
        yield lambda: on_database(settings, lambda database: end_key(database, secret))
        other.close()
    elif how == "session":
        session = cat.client.session()
        opened = cat.client.post(
            "/create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            model_path=cat.paths[MEOW],
        )
        sampler = opened.json()["sampling_session_id"]
        # Its version is loaded by then: a sample that is cancelled before has no tokens to count.
        cat.client.wait(cat.send(tokens=1, sampler=sampler))
        cat.send(tokens=ENDLESS, sampler=sampler)
        yield lambda: cat.client.post(f"/sessions/{session}/finish").raise_for_status()
    else:
        request_id = cat.send(tokens=ENDLESS)
        if how == "operator":
            yield lambda: weft(service.data, "operation", "cancel", request_id)
        else:
            yield lambda: cat.client.post("/cancel_future", request_id=request_id).raise_for_status()


def test_restart_keeps_a_pause_and_the_samples_behind_it(service: Service, tmp_path: Any) -> None:
    with ServiceProcess(data=tmp_path / "data", base_models=[f"{BASE_NAME}={service.model}"]) as process:
        assert process.first_key is not None
        client = RawClient(process.base_url, process.first_key)
        speaker = teach(client, {MEOW: 1})
        speaker.gate("pause", mode="keep", reason="maintenance")
        waiting = speaker.stream(tokens=5)
        client.close()
        process.kill()
        process.start()
        again = Speaker(RawClient(process.base_url, client.key), speaker.run, speaker.sampler, speaker.paths)
        state = again.gate()
        assert (state["state"], state["reason"], state["in_flight"]) == ("paused", "maintenance", 0)
        again.gate("resume")
        answer = again.client.wait(waiting.request_id)
        assert len(answer.json()["sequences"][0]["tokens"]) == 5
        again.client.close()
