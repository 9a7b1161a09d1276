"""Samples of the real SDK, in a process of its own, beside a browser."""

import json
import subprocess
import sys

from tests.conftest import ROOT

_SECONDS = 200


def begin_sdk_samples(
    url: str, key: str, path: str, *, tokens: int, prompt: str = "Say: ", count: int = 1
) -> subprocess.Popen[str]:
    """Begin greedy samples of a checkpoint; returns once they are accepted."""
    command = [sys.executable, "-m", "tests.ui.sdk_sample", url, key, path, prompt, str(tokens), str(count)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "begun"
    return process


def finish_sdk_samples(process: subprocess.Popen[str]) -> list[list[int]]:
    """Wait for the samples' tokens."""
    printed, _ = process.communicate(timeout=_SECONDS)
    assert process.returncode == 0
    found: list[list[int]] = json.loads(printed.strip().splitlines()[-1])
    return found


def sdk_samples(url: str, key: str, path: str, *, tokens: int) -> list[list[int]]:
    """Return the tokens of one greedy sample."""
    return finish_sdk_samples(begin_sdk_samples(url, key, path, tokens=tokens))
