"""One attacker with a valid key beside honest tenants: ``python -m bench.hostile [--cluster]``.

Starts ``weft serve`` on the tiny base; with ``--cluster`` a Redis, a throw-away PostgreSQL database and ``weft up``. One honest
tenant trains by the SDK, one draws 16-token samples, one step and one sample at a time. A prober asks ``/healthz`` and
heartbeats 20 times a second each. After a while without an attacker, whose figures are the measure, one attacker makes each
attack of ``bench.hostile.attacks`` for some seconds, and then all at once. What an attack has left pending is cancelled before
the next one, whose row would else tell of both. Prints a row for each and, last, one JSON line with the worst of all rows.

The attacker's process has the lowest priority (``nice`` 19), since it shares the machine's cores with the service: the
figures are to be the service's, not those of a machine whose cores the attacker's own work fills. Its own share is printed.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.clients.weft_client import open_session
from bench.hostile import figures
from bench.hostile.attacker import AttackTask, Strike
from bench.hostile.attacks import ATTACKS
from bench.hostile.backlog import cancel_backlog
from bench.hostile.figures import Felt, Honest, Row
from bench.hostile.meter import Meter
from bench.hostile.stored_bytes import stored_bytes
from bench.hostile.trainer import TrainingTask
from bench.hostile.webhooks import NETWORKS
from bench.load.clients import LoadTask
from bench.load.probes import ProbeTask
from bench.processes.json_process import JsonProcess
from bench.report import rounded
from cli.administration import on_database
from contracts.base_model import read_base_model_facts
from engine.model.tiny_model import write_tiny_model
from store.database import Database
from store.settings import Settings
from tenants.limits import Limits, set_tenant
from testing.cluster_process import ClusterProcess, started_service
from testing.service_process import ServiceProcess

BASE = "weft/tiny"
ATTACKER = "attacker"
_TENANTS = ("trainer", "sampler", "prober", ATTACKER)
_PROBES_A_SECOND = 20.0
_SAMPLE_TOKENS = 16
_STORED_BYTES = 64 * 2**20
"""The attacker's own limit of stored bytes: so low that the attacks reach it."""
_WARM_UP_SECONDS = 30.0
"""Seconds that the honest tenants get to begin; the SDK alone takes long to load."""
_REST_SECONDS = 4.0
"""Seconds between two strikes, in which the attacker ends its sessions."""
_SETTLED_SECONDS = 2.5
"""Seconds after a strike by whose end the requests that were on their way have been answered."""
_TOGETHER = "all at once"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Times of the run, in seconds of ``time.monotonic``."""

    calm: float
    strikes: list[Strike]

    @property
    def ends(self) -> float:
        """End of the last strike and of its rest."""
        return self.strikes[-1].end + _REST_SECONDS

    @classmethod
    def of(cls, attacks: Sequence[str], *, now: float, calm: float, seconds: float, together: float) -> "Schedule":
        """Return the schedule that begins ``now``: a warm-up, calm, every attack by itself, and all of them at once."""
        begins = now + _WARM_UP_SECONDS
        at, strikes = begins + calm, []
        for name in attacks:
            strikes.append(Strike(name, [name], at, at + seconds))
            at += seconds + _REST_SECONDS
        if together:
            strikes.append(Strike(_TOGETHER, list(attacks), at, at + together))
        return cls(begins, strikes)


@dataclass(frozen=True, slots=True)
class Reports:
    """Answers of the helper processes."""

    probes: Mapping[str, Any]
    trained: Mapping[str, Any]
    sampled: Mapping[str, Any]
    tallies: Mapping[str, Any]

    @property
    def honest(self) -> Honest:
        """The honest tenants' times."""
        return Honest(self.probes, self.trained["steps"], self.sampled["samples"])

    @property
    def errors(self) -> list[str]:
        """Texts of the honest tenants' errors."""
        probes = [text for kind in ("healthz", "heartbeat") for text in self.probes[kind]["failed"]]
        return [*probes, *self.trained["errors"], *self.sampled["shown_errors"]]

    @property
    def errors_count(self) -> int:
        """Number of the honest tenants' errors."""
        return len(self.errors) - len(self.sampled["shown_errors"]) + int(self.sampled["errors"])

    @property
    def hung(self) -> int:
        """Number of the honest tenants' requests without an answer."""
        return int(self.trained["hung"]) + int(self.sampled["hung"])


def bound(settings: Settings) -> int:
    """Return the most bytes that the attacker may have stored by its limits."""
    limits = Limits.of(settings)
    labelled = 2 * limits.sessions + limits.open_runs
    return limits.pending_bytes + _STORED_BYTES + labelled * limits.metadata_bytes


def measure(service: ServiceProcess, keys: Sequence[str], settings: Settings, schedule: Schedule) -> dict[str, Any]:
    """Run the schedule against a running service and return the figures. ``keys`` are those of ``_TENANTS``."""
    trainer, sampler, prober, attacker = keys
    facts = read_base_model_facts(BASE, settings.data_dir.parent / "tiny", None)
    session = open_session(service.base_url, prober)
    tasks: dict[str, TrainingTask | LoadTask | ProbeTask | AttackTask] = {
        "bench.hostile.trainer": TrainingTask(service.base_url, trainer, BASE, facts.vocabulary_size, schedule.ends),
        "bench.load.clients": LoadTask(
            base_url=service.base_url,
            base_model=BASE,
            vocabulary=facts.vocabulary_size,
            sampling_keys=[sampler],
            training_keys=[],
            concurrent=1,
            sample_tokens=_SAMPLE_TOKENS,
            ramp_seconds=0.0,
            ends=schedule.ends,
        ),
        "bench.load.probes": ProbeTask(service.base_url, prober, session, schedule.ends, _PROBES_A_SECOND),
        "bench.hostile.attacker": AttackTask(service.base_url, attacker, BASE, schedule.strikes),
    }
    with ExitStack() as stack:
        meter = stack.enter_context(Meter(service.pid))
        processes = [stack.enter_context(JsonProcess(module, asdict(task))) for module, task in tasks.items()]
        stored = []
        for strike in schedule.strikes:
            time.sleep(max(0.0, strike.end - time.monotonic()))
            stored.append(stored_bytes(settings, ATTACKER))
            on_database(settings, lambda database: cancel_backlog(database, settings, ATTACKER))
            # Requests that were on their way have been accepted meanwhile.
            time.sleep(max(0.0, strike.end + _SETTLED_SECONDS - time.monotonic()))
            on_database(settings, lambda database: cancel_backlog(database, settings, ATTACKER))
        trained, sampled, probes, tallies = (process.result() for process in processes)
    reports = Reports(probes, trained, sampled, tallies)
    calm = reports.honest.felt(schedule.calm, schedule.strikes[0].begin)
    if not all(map(math.isfinite, (calm.healthz_p99, calm.heartbeat_p99, calm.step_p50, calm.sample_p50))):
        raise RuntimeError(f"the honest tenants had not begun when the measuring began: {reports.errors[:5]}")
    rows = [
        figures.row(strike, reports.honest, calm, meter, tallies[strike.name], nbytes)
        for strike, nbytes in zip(schedule.strikes, stored, strict=True)
    ]
    _show(calm, rows, reports)
    return _verdict(rows, reports, meter, schedule, stored, settings)


def _verdict(
    rows: Sequence[Row],
    reports: Reports,
    meter: Meter,
    schedule: Schedule,
    stored: Sequence[int],
    settings: Settings,
) -> dict[str, Any]:
    calm = max(meter.within(schedule.calm, schedule.strikes[0].begin), key=lambda one: one.rss_mib)
    most = max((one for one in meter.readings if one.at >= schedule.calm), key=lambda one: one.rss_mib)
    for name, rss in most.rss_of.items():
        print(f"memory of {name}: {calm.rss_of.get(name, 0.0):.0f} MiB in the calm, {rss:.0f} when most was used")
    return {
        **figures.worst(rows),
        "honest_errors": reports.errors_count,
        "hung": reports.hung,
        "rss_growth_mib": most.rss_mib - calm.rss_mib,
        "attacker_stored_bytes": max(stored),
        "attacker_stored_bytes_bound": bound(settings),
        "attacker_5xx": sum(count for one in rows for status, count in one.answers.items() if 500 <= int(status) < 600),
        "attacker_cores_max": max(one.attacker_cores for one in rows),
        "attacks": len(rows),
    }


def _show(calm: Felt, rows: Sequence[Row], reports: Reports) -> None:
    for text in reports.errors[:20]:
        print("error:", text)
    for name, tally in reports.tallies.items():
        for text in tally["unforeseen"]:
            print("attacker:", name, text)
    print(figures.HEADER)
    print(
        f"{'none':18} {calm.healthz_p99:8.0f} {calm.heartbeat_p99:8.0f} {calm.step_p50:7.0f} {1:6.2f} {calm.sample_p50:7.0f} "
        f"{1:6.2f}"
    )
    for one in rows:
        print(one.text())


def _bound_storage(settings: Settings) -> None:
    async def bound_storage(database: Database) -> None:
        async with database.write() as transaction:
            await set_tenant(transaction, name=ATTACKER, limits={"stored_bytes": _STORED_BYTES})

    on_database(settings, bound_storage)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="store_true", help="the service is `weft up`, not `weft serve`")
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), help="default: all")
    parser.add_argument("--calm", type=float, default=20.0, help="seconds without an attacker")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--together", type=float, default=20.0, help="seconds of all attacks at once; 0 for none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-hostile-") as name:
        folder = Path(name)
        write_tiny_model(folder / "tiny")
        with started_service(
            data=folder / "data",
            base_models=[f"{BASE}={folder / 'tiny'}"],
            tenants=_TENANTS,
            environment={"WEFT_WEBHOOK_NETWORKS": NETWORKS},
            is_cluster=options.cluster,
        ) as (service, keys):
            url = service.database_url if isinstance(service, ClusterProcess) else None
            settings = Settings(data_dir=folder / "data", database_url=url)
            _bound_storage(settings)
            schedule = Schedule.of(
                options.attacks,
                now=time.monotonic(),
                calm=options.calm,
                seconds=options.seconds,
                together=options.together,
            )
            found = measure(service, keys, settings, schedule)
            if found["honest_errors"] or found["hung"] or found["attacker_5xx"]:
                print(service.log_tail(6000))
    found = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in found.items()
    }
    print(json.dumps(rounded(found, 2)))
