"""The benchmark of the dashboard, small: viewers miss no point, pages are found with nothing, and every figure is told."""

import json
import subprocess
import sys

from tests.conftest import ROOT


def test_viewers_beside_training_miss_nothing_and_pages_are_clean() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "bench.dashboard", "--viewers", "6", "--runs", "120"]
    command += ["--turns", "1", "--seconds", "2", "--pages", "1"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert finished.returncode == 0, finished.stderr[-2000:]
    figures = json.loads(finished.stdout.splitlines()[-1])
    assert figures["wrong_points"] == 0
    assert (figures["csp_violations"], figures["console_errors"], figures["axe_serious"]) == (0, 0, 0)
    assert figures["throughput_ratio"] > 0
    assert figures["runs_page_p95_ms"] > 0
    assert 0 <= figures["point_to_pixel_p50_ms"] < 60_000
