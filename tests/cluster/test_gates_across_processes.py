"""Gates, swaps and streams where APIs, trainers and pools are processes of their own."""

import uuid
from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.conftest import Cluster
from tests.e2e.raw_client import RawClient
from tests.e2e.speaker import BARK, LONG, LOWS, MEOW, Speaker, teach, text


@pytest.fixture(scope="module")
def pair(whole_cluster: Cluster) -> Iterator[tuple[Speaker, Speaker]]:
    """Two adapters: one says meow or bark, another tenant's lows."""
    whole_cluster.settle()
    url, suffix = whole_cluster.process.base_url, uuid.uuid4().hex[:8]
    clients = [RawClient(url, whole_cluster.tenant_key(f"{name}-{suffix}")) for name in ("cat", "cow")]
    yield teach(clients[0], {MEOW: 25, BARK: 30}), teach(clients[1], {LOWS: 25})
    for client in clients:
        client.close()


def test_a_sample_that_spans_a_swap_reads_meow_then_bark(pair: tuple[Speaker, Speaker], cluster: Cluster) -> None:
    cat, cow = pair
    beside = cow.stream().until_tokens(3)
    _, made = cat.swapped(BARK)
    assert text(made).startswith("meow meow ")
    assert "bark bark bark" in text(made)[-20:]
    assert set(text(beside.finish()["sequences"][0]["tokens"])) <= set(LOWS)
    assert cow.report(beside)["attempts"] == 1


def test_a_pause_cuts_in_every_pool_and_outlives_an_api(pair: tuple[Speaker, Speaker], cluster: Cluster) -> None:
    cat, cow = pair
    cat.says(MEOW)
    mine, theirs = ([speaker.stream(tokens=2 * LONG) for _ in range(4)] for speaker in pair)
    for stream in (*mine, *theirs):
        stream.until_tokens(3)
    pools = cluster.process.query("SELECT count(DISTINCT process) FROM samples_in_flight")
    assert pools == [(2,)], "both pools sample"
    assert cat.gate("pause", mode="keep")["in_flight"] == 0
    for stream in theirs:
        stream.finish()
        assert cow.report(stream)["attempts"] == 1
    assert [stream.done for stream in mine] == [None] * 4
    # The gate is nobody's memory. The streams of the killed one end with it; their samples do not.
    requests = [stream.request_id for stream in mine]
    cluster.process.kill_child(cluster.process.children("api")[0])
    survivor = RawClient(cluster.process.base_url, cat.client.key)
    cluster.until(lambda: len(cluster.process.children("api")) == 2, "the API is started again")

    def is_open() -> bool:
        try:
            return survivor.post(f"/adapters/{cat.run}/resume").status_code == 200
        except httpx.TransportError:
            # The connection was one that the killed API had not accepted yet.
            return False

    cluster.until(is_open, "an API opens the gate")
    for request in requests:
        made = survivor.wait(request).json()["sequences"][0]
        assert text(made["tokens"]).startswith("meow meow")
        assert made["stop_reason"] == "length"
    survivor.close()


def test_a_sample_keeps_its_age_through_an_absent_database(pair: tuple[Speaker, Speaker], cluster: Cluster) -> None:
    """A sample's age is counted in versions. Only the pool that continues the sample knows how old it was."""
    cat, cow = pair
    for word in (MEOW, BARK, MEOW):
        cat.says(word)
    answer = cat.client.post(f"/samplers/{cat.sampler}/staleness", max_version_lag=0, on_stale="fail")
    assert answer.status_code == 200, answer.text
    beside, sample = cow.stream().until_tokens(3), cat.stream().until_tokens(5)
    seen = outages_seen(cluster)
    # It expires while the database is away: the sample then asks the database how the gate stands.
    assert cat.gate("pause", mode="keep", ttl_seconds=1)["in_flight"] == 0
    cluster.postgres.cut()
    try:
        cluster.until(lambda: outages_seen(cluster) > seen, "a sample has met the outage")
    finally:
        cluster.postgres.restore()
    cluster.settle()
    made = cat.client.wait(sample.request_id).json()["sequences"][0]
    assert made["stop_reason"] == "length"
    assert text(made["tokens"]).startswith("meow meow")
    assert len(cow.client.wait(beside.request_id).json()["sequences"][0]["tokens"]) == LONG


def outages_seen(cluster: Cluster) -> int:
    """Return how often a pool has logged that a sample waits for the database."""
    return cluster.process.printed_tail(10_000_000).count("WARNING workers.sampling.worker the database")
