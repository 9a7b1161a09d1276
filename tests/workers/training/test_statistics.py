"""Counts of the trainer's work: sums over passes, what came since, and a line of them for the log."""

from dataclasses import replace

import pytest

from contracts.pass_report import PassReport
from workers.training.statistics import TrainingStatistics

REPORT = PassReport(
    adapters=3, sequences=5, tokens=90, padded_tokens=100, seconds=1.0, low_rank_seconds=0.25, loss_seconds=0.5
)


def test_passes_and_steps_add_up() -> None:
    statistics = TrainingStatistics()
    statistics.add_pass(REPORT, tenants=2)
    statistics.add_pass(replace(REPORT, adapters=1, tokens=60), tenants=1)
    statistics.add_steps(4, seconds=0.125)
    assert (statistics.passes, statistics.tenants, statistics.adapters, statistics.sequences) == (2, 3, 4, 10)
    assert (statistics.tokens, statistics.padded_tokens, statistics.padding_share) == (150, 200, 0.25)
    assert (statistics.base_seconds, statistics.low_rank_seconds, statistics.loss_seconds) == (0.5, 0.5, 1.0)
    assert (statistics.optimizer_steps, statistics.optimizer_seconds) == (4, 0.125)


def test_what_came_since_an_earlier_copy() -> None:
    statistics, only_later = TrainingStatistics(paged_in=1), TrainingStatistics()
    statistics.add_pass(REPORT, tenants=2)
    earlier = replace(statistics)
    for counted in (statistics, only_later):
        counted.add_pass(replace(REPORT, adapters=1), tenants=1)
        counted.add_steps(2, seconds=0.5)
        counted.paged_in += 2
    assert statistics.since(earlier) == only_later
    assert statistics.since(statistics) == TrainingStatistics()


@pytest.mark.parametrize("passes", [0, 2])
def test_the_log_line_tells_how_many_share_a_pass(passes: int) -> None:
    statistics = TrainingStatistics()
    for _ in range(passes):
        statistics.add_pass(REPORT, tenants=2)
    line = str(statistics)
    expected = (
        ("tenants_per_pass=2.0 adapters_per_pass=3.0", "padding=0.100") if passes else ("passes=0", "padding=0.000")
    )
    assert all(part in line for part in expected)
