"""Bounds on the age of a live sampler's samples, through real HTTP; a second tenant's samples run throughout."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Service
from tests.e2e.raw_client import RawClient
from tests.e2e.sample_stream import SampleStream
from tests.e2e.speaker import LONG, MEOW, WOOF, Speaker, teach


@pytest.fixture(scope="module")
def pair(either: Service) -> Iterator[tuple[Speaker, Speaker]]:
    """Two tenants with two versions each; what they say matters to nobody here."""
    clients = [RawClient(either.base_url, key) for key in (either.key, either.other_key)]
    yield teach(clients[0], {MEOW: 2, WOOF: 3}), teach(clients[1], {MEOW: 2, WOOF: 3})
    for client in clients:
        client.close()


@pytest.fixture
def cat(pair: tuple[Speaker, Speaker]) -> Iterator[Speaker]:
    """Without a bound, on its first version."""
    pair[0].says(MEOW)
    yield pair[0]
    bound(pair[0], None)
    pair[0].gate("resume")


@pytest.fixture
def cow(pair: tuple[Speaker, Speaker]) -> Speaker:
    """The other tenant's."""
    return pair[1]


def bound(speaker: Speaker, lag: int | None, on_stale: str = "fail", swaps: str | None = None) -> dict[str, Any]:
    """Set how far the live sampler's samples may fall behind, and what a publication does to them."""
    address = f"/samplers/{speaker.sampler}/staleness"
    answer = speaker.client.post(address, max_version_lag=lag, on_stale=on_stale, swap_policy=swaps)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cut_once(cat: Speaker) -> SampleStream:
    """A sample that has some tokens of the first version and waits behind a pause, while the second is published."""
    stream, _ = cat.acted_on(lambda: cat.gate("pause", mode="keep"))
    cat.says(WOOF)
    return stream


def end_of(stream: SampleStream) -> dict[str, Any]:
    """The error that ends the stream."""
    while (event := stream.next_event()).name != "error":
        assert event.name == "tokens"
    return event.data


def test_a_sample_older_than_its_bound_fails_and_says_why(cat: Speaker, cow: Speaker) -> None:
    assert bound(cat, 0)["max_version_lag"] == 0
    beside, stale = cow.stream(), cut_once(cat)
    cat.gate("resume")
    error = end_of(stale)
    assert error["code"] == "stale_sample"
    assert "1 versions before" in error["error"]
    assert cat.stream(tokens=3).finish()
    assert beside.finish()
    assert cow.report(beside)["attempts"] == 1


def test_a_sample_older_than_its_bound_is_begun_again_if_asked(cat: Speaker, cow: Speaker) -> None:
    bound(cat, 0, "restart")
    beside, stale = cow.stream(), cut_once(cat)
    cat.gate("resume")
    fresh = cat.stream().finish()["sequences"][0]["tokens"]
    assert stale.finish()["sequences"][0]["tokens"] == fresh
    (spans,) = [sequence["spans"] for sequence in cat.report(stale)["sequences"]]
    assert [(span["start"], span["end"]) for span in spans] == [(0, len(fresh))]
    assert len(set(stale.versions)) == 2
    assert beside.finish()
    assert cow.report(beside)["attempts"] == 1


def test_a_sample_within_its_bound_spans_the_swap(cat: Speaker, cow: Speaker) -> None:
    bound(cat, 1)
    beside, old = cow.stream(), cut_once(cat)
    cat.gate("resume")
    old.finish()
    assert [len(sequence["spans"]) for sequence in cat.report(old)["sequences"]] == [2]
    assert beside.finish()


def test_a_sampler_says_whether_a_publication_cuts_its_samples(cat: Speaker, cow: Speaker) -> None:
    """The other tenant's sampler says nothing, so its samples go on with the new version as the service's setting says."""
    assert bound(cat, None, swaps="finish")["swap_policy"] == "finish"
    cow.says(MEOW)
    ours, theirs = (speaker.stream(tokens=3 * LONG).until_tokens(5) for speaker in (cat, cow))
    old, new = cat.gate()["versions"], cat.says(WOOF)
    cow.says(WOOF)
    fresh = cat.stream(tokens=3)
    for stream in (ours, theirs, fresh):
        stream.finish()
    assert [[version] for version in ours.versions] == list(old.values())
    assert (cat.cuts(ours), fresh.versions) == (0, [new])
    assert [len(sequence["spans"]) for sequence in cow.report(theirs)["sequences"]] == [2]
    assert bound(cat, None)["swap_policy"] is None
    cow.says(MEOW)


def test_a_sample_that_was_to_finish_ends_at_once_when_it_is_too_old(cat: Speaker, cow: Speaker) -> None:
    bound(cat, 0, "restart", swaps="finish")
    beside, stale = cow.stream(), cat.stream(tokens=3 * LONG).until_tokens(5)
    new = cat.says(WOOF)
    drawn = 0
    while stale.versions[-1] != new:
        drawn = len(stale.tokens[0])
        stale.next_event()
    assert 5 <= drawn < 3 * LONG
    stale.finish()
    (sequence,) = cat.report(stale)["sequences"]
    assert [span["version"] for span in sequence["spans"]] == [new]
    assert beside.finish()
    assert cow.cuts(beside) == 0


def test_only_publications_of_another_version_count(cat: Speaker, cow: Speaker) -> None:
    before = bound(cat, None)["publications"]
    theirs = cow.client.http.get(f"/samplers/{cow.sampler}/staleness").json()["publications"]
    for word in (MEOW, WOOF, WOOF, MEOW):
        cat.says(word)
    assert bound(cat, None)["publications"] == before + 2
    assert cow.client.http.get(f"/samplers/{cow.sampler}/staleness").json()["publications"] == theirs


def test_a_bound_is_the_owners_and_for_live_samplers_only(cat: Speaker, cow: Speaker) -> None:
    assert cow.client.post(f"/samplers/{cat.sampler}/staleness", max_version_lag=0).status_code == 404
    assert cow.client.http.get(f"/samplers/{cat.sampler}/staleness").status_code == 404
    pinned = cat.client.post(
        "/create_sampling_session",
        session_id=cat.sampler.rsplit(":sample:", 1)[0],
        sampling_session_seq_id=77,
        model_path=cat.paths[MEOW],
    ).json()["sampling_session_id"]
    refused = cat.client.post(f"/samplers/{pinned}/staleness", max_version_lag=0)
    assert (refused.status_code, "pinned" in refused.text) == (400, True)
    for wrong in ({"max_version_lag": -1}, {"max_version_lag": None, "swap_policy": "never"}):
        assert cat.client.post(f"/samplers/{cat.sampler}/staleness", **wrong).status_code == 400
