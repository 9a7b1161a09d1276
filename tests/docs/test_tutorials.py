"""The programs of the tutorials run as they stand, against a real service."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testing.service_process import ServiceProcess
from tests.conftest import ROOT

SECONDS = 240
Run = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Run]:
    """Run a page's first Python block; returns the lines that it printed."""
    data = tmp_path_factory.mktemp("tutorials") / "weft-data"
    with ServiceProcess(data=data, base_models=[f"my/tiny={tiny_model_dir}"]) as service:
        environment = {**os.environ, "TINKER_BASE_URL": service.base_url, "TINKER_API_KEY": service.first_key or ""}

        def run(page: str) -> list[str]:
            program = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[0]
            finished = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, env=environment
            )
            assert finished.returncode == 0, finished.stderr[-4000:]
            return finished.stdout.splitlines()

        yield run


def test_the_first_run_learns_its_answer(run_page: Run) -> None:
    *losses, answer = run_page("docs/tutorials/first-run.md")
    assert float(losses[0]) > 20
    assert float(losses[-1]) < 1
    assert answer == " meow"


def test_the_rl_loop_s_reward_rises(run_page: Run) -> None:
    rewards = [float(line.rpartition(" ")[2]) for line in run_page("docs/tutorials/first-rl-loop.md")]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.5
