"""One ``weft serve`` has a data folder at a time, and its lock ends with it, however it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.errors import InvalidRequest
from store.serving_lock import serving_alone

HOLDER = """
import sys, time
from pathlib import Path
from store.serving_lock import serving_alone
with serving_alone(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_is_refused_with_the_firsts_pid_until_the_first_is_gone(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(InvalidRequest, match=f"pid {first.pid}"), serving_alone(tmp_path):
            pass
        first.kill()
        first.wait()
        with serving_alone(tmp_path):
            assert (tmp_path / "serve.lock").read_text() == f"{os.getpid()}\n"


def test_another_folder_is_another_services(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
    with serving_alone(tmp_path / "cat"), serving_alone(tmp_path / "dog"):
        pass
