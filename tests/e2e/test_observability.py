"""A real service after two tenants trained and sampled: its metrics, its log, its traces and its health."""

import json
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.traces import span_id_of
from testing.service_process import ServiceProcess
from tests.e2e.conftest import make_tenant
from tests.e2e.raw_client import RawClient, pass_message
from tests.e2e.span_collector import SpanCollector, span_collector

TOKENS = [72, 101, 108, 108, 111]
LONG = 1500
SECONDS = 60.0
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARTS = ("database", "bases", "workers")
CALLER_SPAN = "b7ad6b7169203331"


@dataclass
class Observed:
    """The service, where it shows itself, what its two tenants did, and where its spans went."""

    process: ServiceProcess
    data: Path
    url: str
    keys: list[str]
    runs: list[str]
    traced: str
    collector: SpanCollector

    def log_lines(self) -> list[dict[str, Any]]:
        """Every line that it has logged."""
        return [json.loads(line) for line in self.process.log_tail(10**9).splitlines()]

    def page(self) -> str:
        """Return the service's metrics of now."""
        return httpx.get(f"{self.url}/metrics", timeout=40).raise_for_status().text

    def samples(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Labels and value of every sample by name."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(self.page()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples that have the labels."""
        return sum(value for found, value in self.samples()[name] if labels.items() <= found.items())

    def ready(self) -> httpx.Response:
        """Asked on the metrics' port."""
        return httpx.get(f"{self.url}/readyz", timeout=SECONDS)


def until(reached: Callable[[], bool]) -> None:
    """Look again until it is so."""
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def free_port() -> int:
    """One that nobody listens on."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def train(client: RawClient, base: str) -> tuple[str, str]:
    """A run and its live sampler; a pass and a step."""
    session = client.session()
    model = client.model(base, session)
    client.passes(pass_message(model, 1, TOKENS))
    client.result(client.step(model, 2, learning_rate=1e-2))
    return model, publish(client, model, 3)


def publish(client: RawClient, model: str, seq_id: int) -> str:
    saved = client.post(
        "/save_weights_for_sampler", model_id=model, seq_id=seq_id, sampling_session_seq_id=seq_id, kind="inflight"
    )
    sampler: str = client.result(saved)["sampling_session_id"]
    return sampler


def sample(client: RawClient, sampler: str, max_tokens: int) -> httpx.Response:
    return client.post(
        "/asample",
        sampling_session_id=sampler,
        seq_id=max_tokens,
        prompt={"chunks": [{"tokens": TOKENS}]},
        sampling_params={"max_tokens": max_tokens, "stop": []},
    )


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Observed]:
    """The base is named by its folder, as when ``--base-model`` is a path alone."""
    data, port = tmp_path_factory.mktemp("observed") / "data", free_port()
    with span_collector() as collector:
        environment = {
            "WEFT_METRICS_PORT": str(port),
            "WEFT_LOG_FORMAT": "json",
            "WEFT_LOG_LEVEL": "debug",
            "WEFT_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "NO_PROXY": "127.0.0.1",
        }
        base = str(tiny_model_dir)
        with ServiceProcess(data=data, base_models=[base], environment=environment) as process:
            keys = [make_tenant(data, "cats"), make_tenant(data, "dogs")]
            clients = [RawClient(process.base_url, key) for key in keys]
            (first, live), (second, other) = [train(client, base) for client in clients]
            clients[1].result(sample(clients[1], other, 4))
            in_flight = sample(clients[0], live, LONG)
            traced = clients[0].http.post(
                "/forward_backward",
                content=pass_message(first, 4, TOKENS).SerializeToString(),
                headers={
                    "Content-Type": "application/x-protobuf",
                    "traceparent": f"00-{TRACE}-{CALLER_SPAN}-01",
                },
            )
            assert traced.headers["x-trace-id"] == TRACE
            clients[0].result(clients[0].step(first, 5, learning_rate=1e-2))
            publish(clients[0], first, 6)
            assert len(clients[0].result(in_flight)["sequences"][0]["tokens"]) == LONG
            url, id = f"http://127.0.0.1:{port}", traced.json()["request_id"]
            yield Observed(process, data, url, keys, [first, second], id, collector)
            for client in clients:
                client.close()


def test_metrics_tell_what_was_done(observed: Observed) -> None:
    assert observed.total("weft_trained_tokens_total", share="1", kind="forward_backward") == 3 * len(TOKENS)
    assert observed.total("weft_sampled_tokens_total", share="1") == 4 + LONG
    assert observed.total("weft_prompt_tokens_total") == 2 * len(TOKENS)
    assert observed.total("weft_samples_finished_total", outcome="done") == 2
    assert observed.total("weft_optimizer_steps_total") == 3
    passes = observed.total("weft_pass_seconds_count")
    assert 2 <= passes <= 3
    assert observed.total("weft_pass_tokens_sum") == 3 * len(TOKENS)
    for name in ("sequences", "adapters", "tenants"):
        assert observed.total(f"weft_pass_{name}_sum") == 3
    parts = sum(observed.total("weft_pass_part_seconds_total", part=part) for part in ("base", "low_rank", "loss"))
    assert parts == pytest.approx(observed.total("weft_pass_seconds_sum"), rel=1e-6)
    assert observed.total("weft_pass_padding_ratio_count") == passes
    assert observed.total("weft_publish_seconds_count") == 3
    assert observed.total("weft_operations_finished_total", kind="forward_backward", outcome="done") == 3
    assert observed.total("weft_queue_wait_seconds_count", kind="forward_backward") == 3
    assert observed.total("weft_queue_wait_seconds_count", kind="sample") == 2
    assert observed.total("weft_queue_wait_seconds_sum") < SECONDS


def test_metrics_tell_of_a_swap_in_flight(observed: Observed) -> None:
    assert observed.total("weft_samples_cut_total", reason="version") == 1
    assert observed.total("weft_samples_continued_total") == 1
    assert observed.total("weft_sample_attempts_sum") == 3
    assert observed.total("weft_swap_seconds_count") == 1
    assert 0 < observed.total("weft_swap_seconds_sum") < SECONDS


def test_metrics_tell_how_the_process_stands(observed: Observed) -> None:
    assert observed.total("weft_adapters_resident") == 2
    ((labels, up),) = observed.samples()["weft_replica_up"]
    assert (labels["replica"], up) == ("torch", 1)
    for name in ("sequences", "draining", "asleep"):
        assert observed.total(f"weft_replica_{name}") == 0
    assert observed.total("weft_database_up") == 1
    assert observed.total("weft_event_loop_lag_seconds") < SECONDS
    assert observed.total("weft_process_info", process="serve") == 1
    assert observed.total("process_resident_memory_bytes") > 0


def test_the_queue_is_seen_while_it_is_there(observed: Observed) -> None:
    client = RawClient(observed.process.base_url, observed.keys[0])
    # A hole before it: it waits until the hole is filled.
    client.step(observed.runs[0], 8, learning_rate=1e-3)
    names = ("weft_pending_operations", "weft_oldest_pending_seconds")
    until(lambda: names[0] in observed.samples() and all(observed.total(name, kind="optim_step") > 0 for name in names))
    assert observed.total(names[0], kind="optim_step") == 1
    client.result(client.step(observed.runs[0], 7, learning_rate=1e-3))
    until(lambda: observed.total(names[0], kind="optim_step") == 0)
    client.close()


def test_requests_are_counted_by_route_method_and_status(observed: Observed) -> None:
    assert observed.total("weft_http_requests_total", route="/api/v1/asample", method="POST", status="200") == 2
    assert observed.total("weft_http_request_seconds_count", route="/api/v1/asample") == 2
    httpx.get(f"{observed.process.base_url}/wp-login.php", timeout=40)
    # Readers within a second share one text, which may be older than the request.
    until(lambda: observed.total("weft_http_requests_total", route="unmatched", method="GET") >= 1)
    assert "wp-login" not in observed.page()


def test_the_page_names_no_tenant_no_key_and_no_path(observed: Observed) -> None:
    page = observed.page()
    tenants = {line["tenant"] for line in observed.log_lines() if "tenant" in line}
    assert len(tenants) == 2
    for secret in (*observed.keys, *observed.runs, *tenants, "cats", "dogs", str(observed.data.parent), "/models"):
        assert secret not in page


def test_the_trainers_log_has_the_clients_trace_id(observed: Observed) -> None:
    (line,) = [one for one in observed.log_lines() if one.get("operation") == observed.traced]
    assert line["logger"] == "telemetry.training"
    assert (line["trace_id"], line["process"], line["level"]) == (TRACE, "serve", "debug")
    assert line["tenant"]
    assert line["message"].startswith("operation done kind=forward_backward")


def test_spans_of_a_request_lead_to_the_pass(observed: Observed) -> None:
    accept, wait = "accept forward_backward", "wait forward_backward"
    request = "POST /api/v1/forward_backward"
    until(lambda: {request, accept, wait} <= observed.collector.of_trace(TRACE).keys())
    spans, id = observed.collector.of_trace(TRACE), span_id_of(observed.traced)
    assert spans[request].parent_span_id.hex() == CALLER_SPAN
    assert spans[accept].parent_span_id == spans[request].span_id
    assert spans[wait].parent_span_id == spans[accept].span_id == bytes.fromhex(id)
    passes = [one for one in observed.collector.spans if one.name == "pass"]
    (linked,) = [one for one in passes for link in one.links if link.span_id.hex() == id]
    assert linked.links[0].trace_id.hex() == TRACE
    assert linked.end_time_unix_nano > linked.start_time_unix_nano
    until(lambda: sum(one.name == "sample attempt" for one in observed.collector.spans) == 3)


def test_health_while_the_database_is_locked_or_away(observed: Observed) -> None:
    def parts(url: str) -> tuple[int, dict[str, str]]:
        answer = httpx.get(f"{url}/readyz", timeout=40)
        assert answer.json()["ready"] is (answer.status_code == 200)
        return answer.status_code, answer.json()["parts"]

    for url in (observed.url, observed.process.base_url):
        until(partial(lambda url: parts(url) == (200, dict.fromkeys(PARTS, "ok")), url))
    database = observed.data / "weft.db"
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        until(lambda: observed.ready().status_code == 503)
        assert httpx.get(f"{observed.url}/healthz", timeout=40).json() == {"status": "ok"}
        assert httpx.get(f"{observed.process.base_url}/api/v1/healthz", timeout=40).json() == {"status": "ok"}
        locked = {"database": "failed (OperationalError)", "bases": "ok", "workers": "ok"}
        until(lambda: parts(observed.process.base_url) == (503, locked))
        other.execute("ROLLBACK")
    until(lambda: observed.ready().status_code == 200)
    away = database.rename(database.with_name("away.db"))
    until(lambda: observed.ready().status_code == 503)
    assert httpx.get(f"{observed.url}/healthz", timeout=40).status_code == 200
    away.rename(database)
    until(lambda: observed.ready().status_code == 200)
