import asyncio
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from contracts.errors import InvalidRequest
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import ReadyOperation
from contracts.operations import ForwardBackwardOutput, OperationKind, UnloadModel
from telemetry import exposition as exposition_module
from telemetry.collectors import QueueState
from telemetry.exposition import Exposition
from telemetry.labels import base_label, replica_label, share_class
from telemetry.metrics import Metrics
from telemetry.readiness import NotReady, Readiness
from telemetry.telemetry import Telemetry

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Replica:
    """State of a replica, as the router knows it."""

    name: str
    sequences: int = 0
    works: bool = True
    is_draining: bool = False
    is_asleep: bool | None = False


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("test", lambda: NOW)


@pytest.mark.parametrize(
    ("share", "shown"),
    [(1.0, "1"), (1.3, "1"), (3.0, "4"), (0.5, "0.5"), (1e9, "64"), (1e-9, "0.0625"), (0.0, "0.0625")],
)
def test_shares_make_few_classes(share: float, shown: str) -> None:
    assert share_class(share) == shown


def test_labels_hold_no_path_and_no_secret() -> None:
    assert base_label("org/name") == "org/name"
    one, other = base_label("/secret/one/tiny"), base_label("/secret/other/tiny")
    assert one != other
    assert one.startswith("tiny-")
    assert replica_label("torch:/secret/tiny", "/secret/tiny") == "torch"
    assert replica_label("vllm-user:password@host:8000/v1", "org/name") == "host:8000"
    assert replica_label("vllm-host:8000", "org/name") == "vllm-host:8000"
    assert replica_label("vllm-0", "org/name") == "vllm-0"
    assert replica_label("pool-0/vllm-0", "org/name") == "pool-0/vllm-0"
    assert replica_label("pool-0/torch:org/name", "org/name") == "pool-0/torch"
    assert replica_label("node.1/vllm-user:password@host:8000/v1", "org/name") == "node.1/host:8000"


def test_each_process_has_metrics_of_its_own(metrics: Metrics) -> None:
    other = Metrics("test", lambda: NOW)
    metrics.lease_moved("expired")
    assert metrics.registry.get_sample_value("weft_lease_moves_total", {"reason": "expired"}) == 1
    assert other.registry.get_sample_value("weft_lease_moves_total", {"reason": "expired"}) is None


def test_a_queue_that_drains_is_shown_as_empty_and_one_that_is_unknown_not_at_all(metrics: Metrics) -> None:
    labels = {"kind": "sample", "base": "org/name"}

    def shown() -> list[float | None]:
        names = ("weft_database_up", "weft_pending_operations", "weft_oldest_pending_seconds")
        return [metrics.registry.get_sample_value(name, labels if name != "weft_database_up" else {}) for name in names]

    assert shown() == [None, None, None]
    metrics.queue_read([QueueState("sample", "org/name", 7, 2, NOW - timedelta(seconds=90))])
    assert shown() == [1, 7, 90]
    metrics.queue_read(None)
    assert shown() == [0, None, None]
    metrics.queue_read([])
    assert shown() == [1, 0, 0]


def test_replicas_are_shown_as_they_are_when_asked(metrics: Metrics) -> None:
    replicas = [Replica("vllm-0"), Replica("vllm-1", sequences=3)]
    metrics.watch_replicas("org/name", lambda: replicas)
    replicas[0].works = False
    replicas[1].is_draining = True
    value = metrics.registry.get_sample_value
    assert value("weft_replica_up", {"base": "org/name", "replica": "vllm-0"}) == 0
    assert value("weft_replica_draining", {"base": "org/name", "replica": "vllm-1"}) == 1
    assert value("weft_replica_sequences", {"base": "org/name", "replica": "vllm-1"}) == 3


def test_methods_that_nobody_knows_make_no_series_of_their_own(metrics: Metrics) -> None:
    for number in range(20):
        metrics.http.answered("unmatched", f"METHOD{number}", 405, started=0.0)
    labels = {"route": "unmatched", "method": "other", "status": "405"}
    assert metrics.registry.get_sample_value("weft_http_requests_total", labels) == 20
    assert b"METHOD" not in generate_latest(metrics.registry)


async def test_a_process_without_http_of_its_own_is_scraped_and_asked(metrics: Metrics) -> None:
    able = True

    async def broker() -> None:
        if not able:
            raise NotReady("does not answer")

    async def secret() -> None:
        raise RuntimeError("password=tiger")

    readiness = Readiness()
    readiness.add("broker", broker)
    exposition = Exposition(metrics.registry, readiness, host="127.0.0.1", port=0, http=HttpToolsProtocol)
    await exposition.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{exposition.port}", timeout=40) as client:
        assert 'weft_process_info{process="test"} 1.0' in (await client.get("/metrics")).text
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert (await client.get("/readyz")).json() == {"ready": True, "parts": {"broker": "ok"}}
        assert (await client.get("/etc")).status_code == 404
        able, readiness.kept_seconds = False, 0.0
        readiness.add("secret", secret)
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["parts"] == {"broker": "does not answer", "secret": "failed (RuntimeError)"}
        taken = Exposition(metrics.registry, readiness, host="127.0.0.1", port=exposition.port, http=HttpToolsProtocol)
        with pytest.raises(InvalidRequest, match="WEFT_METRICS_PORT"):
            await taken.start()
    await exposition.stop()


class CountedLook(Collector):
    """A metric that tells how often it was read, and on which thread it was written."""

    def __init__(self) -> None:
        self.looks = 0
        self.written_on: set[threading.Thread] = set()

    def collect(self) -> Iterable[Metric]:
        self.looks += 1
        metric = Metric("looks", "Reads of the metrics.", "gauge")
        metric.add_sample("looks", {}, self.looks)
        metric.samples = NotedSamples(metric.samples, self)
        return [metric]


class NotedSamples(list):  # type: ignore[type-arg]
    """Samples that note who writes them."""

    def __init__(self, samples: list[object], look: CountedLook) -> None:
        super().__init__(samples)
        self._look = look

    def __iter__(self) -> Iterator[object]:
        self._look.written_on.add(threading.current_thread())
        return super().__iter__()


async def test_strangers_who_ask_for_the_metrics_share_one_text_that_is_written_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exposition_module, "KEPT_SECONDS", 3600.0)
    registry, look = CollectorRegistry(), CountedLook()
    registry.register(look)
    begun = look.looks
    exposition = Exposition(registry, Readiness(), host="127.0.0.1", port=0, http=HttpToolsProtocol)
    await exposition.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{exposition.port}", timeout=40) as client:
        plain = {"accept-encoding": "identity"}
        answers = await asyncio.gather(*(client.get("/metrics", headers=plain) for _ in range(24)))
        zipped = await client.get("/metrics?name[]=looks", headers={"accept": "application/openmetrics-text"})
    await exposition.stop()
    assert {answer.text for answer in answers} == {zipped.text}
    assert f"looks {look.looks:.1f}" in zipped.text
    assert (zipped.headers["content-encoding"], "content-encoding" in answers[0].headers) == ("gzip", False)
    assert zipped.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert look.looks == begun + 1
    assert threading.main_thread() not in look.written_on


async def test_the_metrics_are_read_anew_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition_module, "KEPT_SECONDS", 0.0)
    metrics = Metrics("test", lambda: NOW)
    exposition = Exposition(metrics.registry, Readiness(), host="127.0.0.1", port=0, http=HttpToolsProtocol)
    await exposition.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{exposition.port}", timeout=40) as client:
        for lag in (1.0, 2.0):
            metrics.loop_lagged(lag)
            assert f"weft_event_loop_lag_seconds {lag}" in (await client.get("/metrics")).text
    await exposition.stop()


async def test_a_part_that_work_goes_on_without_is_told_of_and_no_more() -> None:
    async def away() -> None:
        raise NotReady("does not answer; it is slower without")

    readiness = Readiness(kept_seconds=0.0)
    readiness.add("broker", away, is_needed=False)
    parts = {"broker": "does not answer; it is slower without"}
    assert (await readiness.look()).content() == {"ready": True, "parts": parts}
    readiness.add("database", away)
    assert (await readiness.look()).status == 503


async def test_many_who_ask_share_one_look() -> None:
    looks = 0

    async def count() -> None:
        nonlocal looks
        looks += 1

    readiness = Readiness({"count": count}, kept_seconds=3600.0)
    for _ in range(50):
        assert (await readiness.look()).is_ready
    assert looks == 1


async def test_a_part_that_does_not_answer_is_not_waited_for() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    verdict = await Readiness({"hung": hang}, seconds=0.05).look()
    assert (verdict.status, verdict.parts) == (503, {"hung": "no answer in 0.05 s"})


def test_how_far_the_sampling_policy_is_shows_by_base_model() -> None:
    """A supervised operation beside it brings no such figure."""
    telemetry = Telemetry.of("test", lambda: NOW)
    training = telemetry.training("org/name")
    metrics = {"loss:sum": 1.0, "sampling_kl:mean": 0.02, "ratio_outside:mean": 0.25, "ratio:max": 3.0}
    for found in (metrics, {"loss:sum": 1.0}):
        operation = ReadyOperation(
            id=RequestId("r"),
            position=1,
            tenant=TenantId("t"),
            lane="run",
            seq_id=1,
            kind=OperationKind.FORWARD_BACKWARD,
            payload=UnloadModel(),
            tokens=4,
        )
        training.finished(operation, ForwardBackwardOutput([], found), share=1.0)

    def shown(name: str) -> tuple[float | None, ...]:
        read = telemetry.metrics.registry.get_sample_value
        return tuple(read(f"weft_policy_{name}_{part}", {"base": "org/name"}) for part in ("count", "sum"))

    assert shown("sampling_kl") == (1, 0.02)
    assert shown("ratio_outside") == (1, 0.25)
    assert shown("ratio_max") == (1, 3.0)


async def test_what_is_expected_is_not_ready_until_it_is_there() -> None:
    async def able() -> None:
        return

    readiness = Readiness({"database": able}, kept_seconds=0.0)
    readiness.expect("trainer of org/name", "starting: loading base model org/name")
    verdict = await readiness.look()
    assert (verdict.status, verdict.parts["database"]) == (503, "ok")
    assert verdict.parts["trainer of org/name"] == "starting: loading base model org/name"
    readiness.add("trainer of org/name", able)
    assert (await readiness.look()).is_ready


async def test_a_part_that_is_added_while_others_are_asked_is_asked_at_the_next_look() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        asked.set()
        await answer.wait()

    async def able() -> None:
        return

    readiness = Readiness({"slow": slow}, kept_seconds=0.0)
    looking = asyncio.create_task(readiness.look())
    await asked.wait()
    readiness.add("late", able)
    answer.set()
    assert (await looking).parts == {"slow": "ok"}
    assert (await readiness.look()).parts == {"slow": "ok", "late": "ok"}
