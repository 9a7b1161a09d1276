"""The benchmark of limits, small: nothing is over its rate, nothing charged twice, with Redis and without."""

import json
import subprocess
import sys

from tests.conftest import ROOT


def test_rates_and_budgets_are_exact_under_repeats_lost_answers_and_a_killed_api() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "bench.limits", "--tenants", "2", "--clients", "8"]
    command += ["--operations", "6", "--turns", "2", "--seconds", "1"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert finished.returncode == 0, finished.stderr[-2000:]
    figures = json.loads(finished.stdout.splitlines()[-1])
    for suffix in ("", "_without_redis"):
        assert figures[f"admitted_minus_allowed{suffix}"] == 0
        assert figures[f"charged_minus_done_tokens{suffix}"] == 0
        assert figures[f"lost{suffix}"] == 0
        assert figures[f"done{suffix}"] == 48
    assert figures["intake_ratio"] > 0
    assert figures["intake_ratio_of_parts"] > 0
