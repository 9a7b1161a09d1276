"""Every program of ``examples/`` runs through the real SDK, and its curve moves."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from examples.rl_async import MAX_LAG
from tests.conftest import ROOT
from tests.e2e.conftest import BASE_NAME, Service

SECONDS = 240
FEW = 3
"""Points at each end of a curve that are compared by their mean."""
Run = Callable[[str], str]


@pytest.fixture(scope="module")
def run_example(service: Service) -> Run:
    """Run an example as a user does; returns what it printed."""
    environment = {**os.environ, "TINKER_BASE_URL": service.base_url, "TINKER_API_KEY": service.key}

    def run(name: str) -> str:
        command = [sys.executable, "-m", f"examples.{name}", "--base-model", BASE_NAME]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, cwd=ROOT)
        assert finished.returncode == 0, finished.stderr[-4000:]
        return finished.stdout

    return run


def curve(printed: str, name: str) -> list[float]:
    """The values that follow ``name``, one of each step."""
    return [float(value) for value in re.findall(rf"^step .*\b{name} (-?[\d.]+)", printed, re.MULTILINE)]


def ends(values: list[float]) -> tuple[float, float]:
    """The mean of a curve's first values and of its last ones."""
    assert len(values) > 2 * FEW
    return sum(values[:FEW]) / FEW, sum(values[-FEW:]) / FEW


def check_rewards(printed: str) -> None:
    """The random base draws few vowels; the adapter has learned to draw them."""
    first, last = ends(curve(printed, "reward"))
    assert first < 0.2
    assert last > first + 0.3


def test_sft_learns_all_of_its_answers(run_example: Run) -> None:
    printed = run_example("sft")
    first, last = ends(curve(printed, "loss"))
    assert last < 0.1 * first
    assert "The cat says: meow\nThe dog says: woof\n" in printed


@pytest.mark.parametrize("name", ["rl_in_step", "rl_one_step_off"])
def test_rewards_of_rl_rise(run_example: Run, name: str) -> None:
    check_rewards(run_example(name))


def test_rewards_of_asynchronous_rl_rise_within_its_bound(run_example: Run) -> None:
    printed = run_example("rl_async")
    check_rewards(printed)
    assert max(curve(printed, "lag")) == MAX_LAG


def test_dpo_comes_to_prefer_the_preferred(run_example: Run) -> None:
    printed = run_example("dpo")
    losses, margins = curve(printed, "loss"), curve(printed, "margin")
    assert losses[0] == pytest.approx(0.693, abs=0.001)
    assert margins[0] == pytest.approx(0.0, abs=0.001)
    assert losses[-1] < 0.3
    assert margins[-1] > 1


def test_distillation_brings_the_student_to_the_teacher(run_example: Run) -> None:
    first, last = ends(curve(run_example("distillation"), "kl"))
    assert last < 0.8 * first


def test_the_client_sees_the_run_that_the_sdk_trains(run_example: Run) -> None:
    printed = run_example("watch")
    losses = curve(printed, "loss")
    assert losses[-1] < losses[0]
    assert "gate paused, sample ended: False\nThe cat says:" in printed
    assert f"used optim_step: {len(losses)} operations, 0 tokens" in printed
    assert f"used forward_backward: {len(losses)} operations" in printed
