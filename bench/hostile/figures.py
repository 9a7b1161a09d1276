"""A row of figures for each strike, and the worst over all of them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.hostile.attacker import Strike
from bench.hostile.meter import Meter

Times = Sequence[tuple[float, float]]
"""(sent, answered), in seconds of ``time.monotonic``."""


@dataclass(frozen=True, slots=True)
class Felt:
    """Times that the honest tenants felt in one window, in milliseconds."""

    healthz_p99: float
    heartbeat_p99: float
    step_p50: float
    sample_p50: float


@dataclass(frozen=True, slots=True)
class Honest:
    """Reports of the honest tenants' processes: ``probes`` by kind, ``steps`` and ``samples``."""

    probes: Mapping[str, Any]
    steps: Times
    samples: Times

    def felt(self, begin: float, end: float) -> Felt:
        """Return the times of the requests that were open between ``begin`` and ``end``, probes by the time they were due."""
        return Felt(
            _p99_ms(self.probes["healthz"], begin, end),
            _p99_ms(self.probes["heartbeat"], begin, end),
            _p50_ms(self.steps, begin, end),
            _p50_ms(self.samples, begin, end),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one strike. ``cores`` are the service's and the attacker's; memory and bytes in MiB."""

    name: str
    felt: Felt
    step_ratio: float
    sample_ratio: float
    rss_growth_mib: float
    stored_mib: float
    service_cores: float
    attacker_cores: float
    answers: Mapping[str, int]

    def text(self) -> str:
        """Return the row as a line of the printed table."""
        felt = self.felt
        answers = " ".join(f"{status}:{count}" for status, count in sorted(self.answers.items()))
        return (
            f"{self.name:18} {felt.healthz_p99:8.0f} {felt.heartbeat_p99:8.0f} {felt.step_p50:7.0f} {self.step_ratio:6.2f} "
            f"{felt.sample_p50:7.0f} {self.sample_ratio:6.2f} {self.rss_growth_mib:7.0f} {self.stored_mib:8.1f} "
            f"{self.service_cores:7.2f} {self.attacker_cores:8.2f}  {answers}"
        )


HEADER = (
    f"{'attack':18} {'healthz':>8} {'beat p99':>8} {'step':>7} {'ratio':>6} {'sample':>7} {'ratio':>6} {'rss+MiB':>7} "
    f"{'stored':>8} {'service':>7} {'attacker':>8}  answers by status"
)


def row(strike: Strike, honest: Honest, calm: Felt, meter: Meter, tally: Mapping[str, Any], stored: int) -> Row:
    """Return the figures of a strike; ``calm`` is what the honest tenants felt before all strikes."""
    felt, seconds = honest.felt(strike.begin, strike.end), strike.end - strike.begin
    readings = meter.within(strike.begin, strike.end)
    before = [one.rss_mib for one in meter.readings if one.at < strike.begin][-1]
    return Row(
        name=strike.name,
        felt=felt,
        step_ratio=felt.step_p50 / calm.step_p50,
        sample_ratio=felt.sample_p50 / calm.sample_p50,
        rss_growth_mib=max((one.rss_mib for one in readings), default=before) - before,
        stored_mib=stored / 2**20,
        service_cores=(readings[-1].cpu_s - readings[0].cpu_s) / seconds if readings else 0.0,
        attacker_cores=tally["cpu_s"] / seconds,
        answers=tally["answers"],
    )


def worst(rows: Sequence[Row]) -> dict[str, float]:
    """Return the worst figures over all strikes."""
    return {
        "healthz_p99_ms": max(one.felt.healthz_p99 for one in rows),
        "heartbeat_p99_ms": max(one.felt.heartbeat_p99 for one in rows),
        "step_p50_ratio": max(one.step_ratio for one in rows),
        "sample_p50_ratio": max(one.sample_ratio for one in rows),
    }


def _p99_ms(probes: Mapping[str, Any], begin: float, end: float) -> float:
    found = [seconds for due, seconds in probes["answered"] if begin <= due < end]
    return float(np.percentile(found, 99)) * 1e3 if found else float("inf")


def _p50_ms(times: Times, begin: float, end: float) -> float:
    found = [answered - sent for sent, answered in times if sent < end and answered > begin]
    return statistics.median(found) * 1e3 if found else float("inf")
