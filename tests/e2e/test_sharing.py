"""Checkpoints are shared through the real SDK: published, granted by a key, copied, and taken back."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.operator_command import weft
from tests.conftest import ROOT
from tests.e2e.conftest import BASE_NAME, Service, make_key, make_tenant

SCRIPT = Path(__file__).with_name("sdk_sharing.py")
PAGE = ROOT / "docs/how-to/share-a-checkpoint.md"
SECONDS = 400
GONE, REFUSED = "NotFoundError", "PermissionDeniedError"


@pytest.fixture(scope="module")
def seen(either: Service) -> dict[str, Any]:
    """Findings of the script, on the sampler in process and on vLLM."""
    owner, other = (make_tenant(either.data, f"sharing-{name}") for name in ("cats", "dogs"))
    viewer = make_key(either.data, "sharing-cats", role="viewer")
    project = weft(either.data, "project", "create", "shared", "--tenant", "sharing-dogs").strip()
    command = [sys.executable, str(SCRIPT), either.base_url, BASE_NAME, owner, viewer, other, project, str(PAGE)]
    environment = {**os.environ, "TINKER_TELEMETRY": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_a_published_checkpoint_is_used_by_others_until_it_is_taken_back(seen: dict[str, Any]) -> None:
    assert seen["published"] == {
        "before": GONE,
        "same_tokens": True,
        "same_loss": True,
        "delete": GONE,
        "pause": 200,
        "tokens_beside_a_pause": 6,
        "resume": 200,
        "sample_after": GONE,
        "load_after": GONE,
        "owner_goes_on": True,
        "trained_goes_on": True,
    }


def test_a_copy_is_the_tenants_own_and_outlives_the_publication(seen: dict[str, Any]) -> None:
    assert seen["copied"] == {
        "before": GONE,
        "same_tokens": True,
        "same_loss": True,
        "owner_reads_it": GONE,
        "listed": True,
        "owner_goes_on": True,
    }


def test_a_key_grants_what_it_may_download_and_no_other_key_does(seen: dict[str, Any]) -> None:
    failed = [REFUSED, REFUSED, "RequestFailedError"]
    assert seen["granted"] == {
        "viewer": failed,
        "no_key": failed,
        "own": failed,
        "created": True,
        "loaded": True,
        "copied": True,
    }


def test_the_page_s_program_loads_and_copies_with_a_key_and_the_default_project(seen: dict[str, Any]) -> None:
    assert seen["as_told"] == {"same_loss": True, "copies": 1}
