"""The overhead benchmark runs end to end and keeps the keys of its JSON line."""

import json
import subprocess
import sys

from tests.conftest import ROOT

KEYS = {
    "forward_backward_p50_ms", "optim_step_p50_ms", "asample_16_tokens_p50_ms",
    "engine_forward_backward_p50_ms", "overhead_p50_ms",
    "floor_forward_backward_p50_ms", "floor_optim_step_p50_ms", "floor_asample_16_tokens_p50_ms",
    "optim_step_to_floor", "forward_backward_to_floor", "asample_to_floor",
}  # fmt: skip


def test_overhead_is_told_as_ratios_to_a_server_that_answers_at_once() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "bench.overhead", "--repeats", "3", "--warm-up", "1"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert finished.returncode == 0, finished.stderr[-2000:]
    figures = json.loads(finished.stdout.splitlines()[-1])
    assert set(figures) == KEYS
    assert all(figures[f"floor_{name}_p50_ms"] > 0 for name in ("forward_backward", "optim_step", "asample_16_tokens"))
    assert figures["asample_to_floor"] > 1
