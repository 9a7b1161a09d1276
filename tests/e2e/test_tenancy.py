"""The unmodified SDK under every mode of suspension, with a viewer's key and with a project's."""

import sys
from pathlib import Path
from typing import Any

import pytest

from testing import operator_command
from tests.e2e.archived_weights import weights
from tests.e2e.conftest import BASE_NAME, Service, make_tenant
from tests.e2e.led_client import led

SCRIPT = Path(__file__).with_name("sdk_tenancy.py")
SECONDS = 400
AT_ONCE = 15.0
"""Seconds in which a final refusal comes; the SDK repeats others for minutes."""


def weft(service: Service, *words: str) -> str:
    """The output of a ``weft`` command on the running service's database."""
    return operator_command.weft(service.data, *words).strip()


def story(service: Service, tenant: str, sdk: str, *, suspends: bool) -> dict[str, Any]:
    """Return the script's findings; with ``suspends`` the tenant is suspended and resumed as the script asks for it."""
    member = make_tenant(service.data, tenant)
    project = weft(service, "project", "create", "archive", "--tenant", tenant)
    viewer = weft(service, "key", "create", "--tenant", tenant, "--role", "viewer")
    of_project = weft(service, "key", "create", "--tenant", tenant, "--project", "archive")
    command = [sys.executable, str(SCRIPT), service.base_url, BASE_NAME, member, viewer, of_project, project]
    command.append("suspended" if suspends else "free")

    def obey(word: str) -> None:
        if suspends and word == "resume":
            weft(service, "tenant", "resume", tenant)
        elif suspends:
            weft(service, "tenant", "suspend", tenant, "--mode", word, "--reason", "unpaid")

    seen = led(command, sdk, obey=obey, seconds=SECONDS)
    return {**seen, "weights": weights(service, member, seen["path"])}


@pytest.mark.parametrize("sdk", ["0.38.0", "0.18.2"])
def test_the_sdk_goes_on_after_each_suspension_and_is_refused_at_once(exact: Service, sdk: str) -> None:
    treated = story(exact, f"suspended-{sdk}", sdk, suspends=True)
    free = story(exact, f"never-suspended-{sdk}", sdk, suspends=False)
    # What was held ran once, what was refused left no hole and changed nothing: the weights are those of a free run.
    assert treated["losses"] == free["losses"]
    assert treated["weights"] == free["weights"]
    assert "read-only" in treated["step"]["text"]
    assert "unpaid" in treated["step"]["text"]
    assert (treated["model"]["status"], treated["model"]["seconds"] < AT_ONCE) == (403, True)
    assert treated["listed"] == 1
    assert (treated["blocked"]["status"], treated["blocked"]["seconds"] < AT_ONCE) == (403, True)
    for seen in (treated, free):
        viewer = seen["viewer"]
        assert viewer["listed"] >= 1
        assert (viewer["model"]["status"], viewer["model"]["seconds"] < AT_ONCE) == (403, True)
        project = seen["project"]
        assert project["before"] == 0
        if "filtered" in project:
            assert project["filtered"] == 1
            assert [project[name]["status"] for name in ("elsewhere", "unknown")] == [403, 403]
        assert project.get("searched", ["active"]) == ["active"]
    assert ("filtered" in free["project"]) == (sdk == "0.38.0")
