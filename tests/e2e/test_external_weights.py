"""Weights out of a service, by the real SDK and by tinker-cookbook's own code, which is unpacked and not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import BASE_NAME, SDK_FOLDERS, Service

SCRIPT = Path(__file__).with_name("sdk_external.py")
TOLERANCE = 1e-4
"""Tolerance of logprobs in fp32: the fused pass, PEFT and merged weights round differently."""


@pytest.mark.parametrize("cookbook", ["0.5.8", "0.6.1"])
def test_external_weights_go_out_sealed_or_plain_and_compute_what_was_trained(service: Service, cookbook: str) -> None:
    """A training checkpoint, an external one, and one that is sealed to two recipients; another tenant gets none."""
    folder = SDK_FOLDERS / f"tinker-cookbook-{cookbook}"
    if not folder.is_dir():
        pytest.fail(f"tinker-cookbook {cookbook} is not unpacked in {folder.name}; run `make setup`")
    arguments = [service.base_url, service.key, service.other_key, BASE_NAME, str(service.model)]
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    seen = json.loads(finished.stdout.strip().splitlines()[-1])
    plain = ["adapter_config.json", "adapter_model.safetensors"]
    assert seen["path"] == "external_weights/plain"
    assert (seen["files"], seen["sealed_files"]) == (plain, [f"{name}.age" for name in plain])
    assert seen["fetched"]
    assert seen["sizes"]
    assert seen["trained_on"]
    assert seen["types"] == {
        "external_weights/plain": "external",
        "external_weights/sealed": "external",
        "weights/kept": "training",
    }
    assert seen["expires"].count("external_weights/plain") >= 1
    assert "external_weights/sealed" not in seen["expires"]
    assert seen["left"] == [], "what a download saves for itself is deleted"
    assert seen["equal"], "sealed and plain, whichever way they came"
    assert seen["by_peft"] < TOLERANCE
    assert seen["by_cookbook"] < TOLERANCE
    assert "has a checkpoint external_weights/plain" in seen["taken"]
    assert seen["unknown"].startswith("RequestErrorCategory.USER") or seen["unknown"].startswith("user")
    assert "age_encryption_recipients" in seen["unknown"]
    assert "at most 10" in seen["many"]
    assert seen["foreign"] == "404"
    assert "must be a weights path" in seen["loaded"]
