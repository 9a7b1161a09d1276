"""A trainer's counts: sums over passes, what was added since a copy, and the log line."""

from dataclasses import replace

import pytest

from contracts.pass_report import PassReport
from telemetry.training_counts import TrainingCounts

REPORT = PassReport(
    adapters=3, sequences=5, tokens=90, padded_tokens=100, seconds=1.0, low_rank_seconds=0.25, loss_seconds=0.5
)


def test_passes_and_steps_add_up() -> None:
    counts = TrainingCounts()
    counts.add_pass(REPORT, tenants=2)
    counts.add_pass(replace(REPORT, adapters=1, tokens=60), tenants=1)
    counts.add_steps(4, seconds=0.125)
    assert (counts.passes, counts.tenants, counts.adapters, counts.sequences) == (2, 3, 4, 10)
    assert (counts.tokens, counts.padded_tokens, counts.padding_share) == (150, 200, 0.25)
    assert (counts.base_seconds, counts.low_rank_seconds, counts.loss_seconds) == (0.5, 0.5, 1.0)
    assert (counts.optimizer_steps, counts.optimizer_seconds) == (4, 0.125)


def test_what_came_since_an_earlier_copy() -> None:
    counts, only_later = TrainingCounts(paged_in=1), TrainingCounts()
    counts.add_pass(REPORT, tenants=2)
    earlier = replace(counts)
    for counted in (counts, only_later):
        counted.add_pass(replace(REPORT, adapters=1), tenants=1)
        counted.add_steps(2, seconds=0.5)
        counted.paged_in += 2
    assert counts.since(earlier) == only_later
    assert counts.since(counts) == TrainingCounts()


@pytest.mark.parametrize("passes", [0, 2])
def test_the_log_line_tells_how_many_share_a_pass(passes: int) -> None:
    counts = TrainingCounts()
    for _ in range(passes):
        counts.add_pass(REPORT, tenants=2)
    line = str(counts)
    expected = (
        ("tenants_per_pass=2.0 adapters_per_pass=3.0", "padding=0.100") if passes else ("passes=0", "padding=0.000")
    )
    assert all(part in line for part in expected)
