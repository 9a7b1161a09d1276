"""Two thousand samples at once while others train, and what light requests feel of it: ``python -m bench.load``.

Starts a Redis, a throw-away PostgreSQL database and ``weft up`` with two APIs, a trainer and a pool. Sixteen tenants keep
128 samples each open, each tenant on an adapter of its own. Four more tenants train, one of them through the real SDK.
``/healthz`` and heartbeats are asked at a steady rate all the while. Prints, last, one JSON line. The warm-up is left out of
rates and percentiles, but not out of ``errors`` and ``hung``.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.clients.sdk_clients import LoadReport, SdkClients
from bench.clients.weft_client import open_session
from bench.load.clients import LoadTask
from bench.load.probes import ProbeTask
from bench.processes.cpu import cpu_seconds
from bench.processes.json_process import JsonProcess
from bench.workload import OperationShape
from cli.administration import on_database
from contracts.base_model import read_base_model_facts
from engine.model.tiny_model import write_tiny_model
from store.database import Database
from store.settings import Settings
from testing.cluster_process import ClusterProcess, RedisProcess
from testing.tenants import new_tenant
from testing.throwaway_database import DEFAULT_SERVER, throwaway_database

BASE = "weft/tiny"
STEP = OperationShape(1, 64)
_OPERATIONS_A_STEP = 2
_GRACE_SECONDS = 5.0
"""Seconds that client processes get to begin."""

Times = Sequence[tuple[float, float]]
"""(begin, end), in seconds of ``time.monotonic``."""


@dataclass(frozen=True, slots=True)
class Load:
    """Size of the load and its length in seconds. ``probes``: probes of each kind in a second."""

    tenants: int = 16
    concurrent: int = 128
    trainers: int = 4
    sample_tokens: int = 16
    warm_up: float = 30.0
    seconds: float = 60.0
    probes: float = 20.0


@dataclass(frozen=True, slots=True)
class Window:
    """Time from ``begin`` to ``end``, whose answers count."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.end - self.begin

    def ended_within(self, times: Times) -> list[tuple[float, float]]:
        """Return the times whose end lies within the window."""
        return [one for one in times if self.begin <= one[1] < self.end]


class Processors:
    """Meter of the cores that each kind of process uses."""

    def __init__(self, cluster: ClusterProcess, clients: Mapping[str, Sequence[int]]) -> None:
        self._pids: dict[str, list[int]] = {kind: list(pids) for kind, pids in clients.items()}
        for kind, command in (("api", "api"), ("pool", "pool"), ("trainer", "worker")):
            self._pids[kind] = [child.pid for child in cluster.children(command)]
        backends = cluster.query("SELECT pid FROM pg_stat_activity WHERE datname = current_database()")
        self._pids["postgres"] = [int(str(pid)) for (pid,) in backends]
        self._began = time.monotonic()
        self._before = self._read()
        self._others = psutil.cpu_times()

    def cores(self) -> dict[str, float]:
        """Return cores used since this object was made, by kind of process; ``machine`` counts all processes of the machine."""
        seconds, now = time.monotonic() - self._began, self._read()
        found = {f"{kind}_cpu": round((now[kind] - self._before[kind]) / seconds, 2) for kind in now}
        idle = psutil.cpu_times().idle - self._others.idle
        return found | {"machine_cpu": round((psutil.cpu_count() or 1) - idle / seconds, 2)}

    def _read(self) -> dict[str, float]:
        return {kind: sum(cpu_seconds(pid) for pid in pids) for kind, pids in self._pids.items()}


def make_tenants(settings: Settings, number: int) -> list[str]:
    """Make ``number`` new tenants and return their keys."""

    async def make(database: Database) -> list[str]:
        return [await new_tenant(database, f"load-{place}") for place in range(number)]

    return on_database(settings, make)


def milliseconds(name: str, probes: Mapping[str, Any], window: Window) -> dict[str, float]:
    """Return percentiles, in milliseconds, of the probes that were due within the window."""
    found = [seconds for due, seconds in probes["answered"] if window.begin <= due < window.end]
    if not found:
        return {}
    p50, p99 = np.percentile(found, (50, 99)) * 1000
    return {
        f"{name}_p50_ms": round(float(p50), 1),
        f"{name}_p99_ms": round(float(p99), 1),
        f"{name}_max_ms": round(max(found) * 1000, 1),
    }


def figures(window: Window, load: dict[str, Any], probes: dict[str, Any], sdk: LoadReport | None) -> dict[str, object]:
    """Return the printed figures, without the processors'."""
    samples = window.ended_within(load["samples"])
    steps = window.ended_within(load["steps"] + ([] if sdk is None else sdk.steps[0]))
    waits = [end - begin for begin, end in samples] or [float("nan")]
    failed = [text for kind in ("healthz", "heartbeat") for text in probes[kind]["failed"]]
    for text in (*load["shown_errors"], *failed[:10]):
        print("error:", text)
    return {
        "errors": load["errors"] + len(failed),
        "hung": load["hung"],
        **milliseconds("healthz", probes["healthz"], window),
        **milliseconds("heartbeat", probes["heartbeat"], window),
        **milliseconds("prober_lateness", probes["lateness"], window),
        "samples_per_s": round(len(samples) / window.seconds, 1),
        "ops_per_s": round(_OPERATIONS_A_STEP * len(steps) / window.seconds, 1),
        "sample_p50_s": round(float(np.percentile(waits, 50)), 2),
        "sample_p99_s": round(float(np.percentile(waits, 99)), 2),
        "samples": len(load["samples"]),
    }


def run(load: Load, *, server: str = DEFAULT_SERVER) -> dict[str, object]:
    """Run the benchmark and return its figures."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-load-")))
        model = folder / "tiny"
        write_tiny_model(model)
        database_url = stack.enter_context(throwaway_database(server))
        redis = stack.enter_context(RedisProcess(folder / "redis"))
        cluster = stack.enter_context(
            ClusterProcess(
                data=folder / "data",
                base_models=[f"{BASE}={model}"],
                database_url=database_url,
                redis_url=redis.url,
                options=["--apis", "2", "--trainers", "1", "--pools", "1"],
            )
        )
        settings = Settings(data_dir=folder / "data", database_url=database_url)
        keys = make_tenants(settings, load.tenants + load.trainers + 1)
        found = measure(cluster, keys, load, vocabulary=read_base_model_facts(BASE, model, None).vocabulary_size)
        if found["errors"] or found["hung"]:
            print(cluster.log_tail(6000))
        return found


def measure(cluster: ClusterProcess, keys: Sequence[str], load: Load, *, vocabulary: int) -> dict[str, object]:
    """Put the load on a running cluster. ``keys`` are the sampling tenants', then the training tenants', then the prober's."""
    *working, probing = keys
    sampling, training = working[: load.tenants], working[load.tenants :]
    with ExitStack() as stack:
        sdk = stack.enter_context(SdkClients(base_url=cluster.base_url, keys=training[:1], base_model=BASE))
        begin = time.monotonic() + _GRACE_SECONDS + load.warm_up
        window = Window(begin, begin + load.seconds)
        task = LoadTask(
            base_url=cluster.base_url,
            base_model=BASE,
            vocabulary=vocabulary,
            sampling_keys=sampling,
            training_keys=training[1:],
            concurrent=load.concurrent,
            sample_tokens=load.sample_tokens,
            ramp_seconds=load.warm_up / 3,
            ends=window.end,
        )
        session = open_session(cluster.base_url, probing)
        probing_task = ProbeTask(cluster.base_url, probing, session, ends=window.end, per_second=load.probes)
        clients = stack.enter_context(JsonProcess("bench.load.clients", asdict(task)))
        prober = stack.enter_context(JsonProcess("bench.load.probes", asdict(probing_task)))
        sdk.start_run(STEP, vocabulary=vocabulary, in_flight=1, seconds=window.end - time.monotonic())
        time.sleep(max(0.0, window.begin - time.monotonic()))
        processors = Processors(cluster, {"client": [clients.pid], "prober": [prober.pid], "sdk": [sdk.pid]})
        time.sleep(max(0.0, window.end - time.monotonic()))
        cores = processors.cores()
        probes, heard, report = prober.result(), clients.result(), sdk.finish_run()
    return figures(window, heard, probes, report) | cores


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in asdict(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--database", default=DEFAULT_SERVER, help="PostgreSQL server for a throw-away database")
    options = vars(parser.parse_args())
    server = options.pop("database")
    print(json.dumps(run(Load(**options), server=server)))
