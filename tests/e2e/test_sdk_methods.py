"""No public method of the newest SDK's clients fails against weft: what a user would miss is no call."""

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import BASE_NAME, FLOW_SECONDS, Service, make_key, make_tenant

SCRIPT = Path(__file__).with_name("sdk_methods.py")


def test_every_public_method_of_the_sdks_clients_is_answered(service: Service) -> None:
    make_tenant(service.data, "methods")
    key = make_key(service.data, "methods", role="admin")
    command = [sys.executable, str(SCRIPT), service.base_url, key, BASE_NAME, "default"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=FLOW_SECONDS)
    assert finished.returncode == 0, finished.stderr[-4000:]
    seen = json.loads(finished.stdout.strip().splitlines()[-1])
    assert {name: error for name, error in seen["called"].items() if error} == {}
    assert sorted(seen["called"]) == seen["public"]
