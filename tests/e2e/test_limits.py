"""The unmodified SDK runs into every limit of its tenant: it waits where it can, and all its work is done."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from testing.operator_command import weft
from tests.e2e.conftest import BASE_NAME, Service, make_tenant

SCRIPT = Path(__file__).with_name("sdk_limits.py")
SECONDS = 240
LIMITS = {"open_runs": 1, "pending_operations": 3, "pending_samples": 2, "checkpoints": 1}


def story(service: Service, key: str) -> dict[str, Any]:
    """Return the script's findings."""
    command = [sys.executable, str(SCRIPT), service.base_url, key, BASE_NAME]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as client:
        timer = threading.Timer(SECONDS, client.kill)
        timer.start()
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stderr is not None
        try:
            begun = client.stdout.readline()
            if begun != "waiting\n":
                pytest.fail(client.stderr.read()[-4000:])
            client.stdin.write("\n")
            client.stdin.flush()
            output = client.stdout.read()
        finally:
            timer.cancel()
        assert client.wait() == 0, client.stderr.read()[-4000:]
    seen: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return seen


def test_a_client_that_knows_no_limits_gets_all_its_work_done(service: Service) -> None:
    bounded, free = make_tenant(service.data, "bounded"), make_tenant(service.data, "free")
    options = [word for name, value in LIMITS.items() for word in ("--limit", f"{name}={value}")]
    weft(service.data, "tenant", "set", "bounded", *options, "--share", "2", "--class", "batch")
    seen, theirs = story(service, bounded), story(service, free)
    # Requests that waited, or were sent again, took effect in order and once.
    assert seen["losses"] == theirs["losses"]
    assert seen["after_refusal"] == theirs["after_refusal"]
    assert seen["second_losses"] == theirs["second_losses"]
    assert seen["samples"] == theirs["samples"]
    assert "2 of 1 checkpoints" in seen["refused"]
    assert "set a TTL" in seen["refused"]
    assert "refused" not in theirs
    assert seen["second_waited"]
    lines = {
        line.split("\t")[0]: line.split("\t")[1:]
        for line in weft(service.data, "tenant", "limits", "bounded").splitlines()
    }
    assert lines["share"] == ["2"]
    assert lines["class"] == ["batch"]
    assert lines["checkpoints"][:3] == ["1", "own", "1"]
    assert lines["sessions"][1] == "default"
    assert int(lines["stored_bytes"][2]) > 0
