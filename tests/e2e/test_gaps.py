"""A request that is refused on its way leaves a gap in its model's seq_ids; the SDK's next requests are answered all the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from testing.service_process import ServiceProcess
from tests.e2e.conftest import BASE_NAME, make_tenant
from tests.e2e.repeating_proxy import RepeatingProxy

SCRIPT = Path(__file__).with_name("sdk_gaps.py")
SETTINGS = {"WEFT_GAP_GRACE": "1", "WEFT_HOUSEKEEPING_INTERVAL": "0.5", "WEFT_MAX_BODY_BYTES": "65536"}
SECONDS = 240


def same(loss: float) -> Any:
    """Return the loss of the same weights, whoever shares the pass: equal up to rounding."""
    return pytest.approx(loss, rel=1e-5)


class RefusingProxy(RepeatingProxy):
    """Refuses the first optimizer step, as a proxy with a small limit of its own does: weft never sees the request."""

    has_refused = False

    async def _handle(self, request: Request) -> Response:
        if request.url.path.endswith("/optim_step") and not self.has_refused:
            self.has_refused = True
            return Response("too large", status_code=413)
        return await super()._handle(request)


def begin(base_url: str, key: str) -> subprocess.Popen[str]:
    """The client as a process of its own."""
    command = [sys.executable, str(SCRIPT), base_url, key, BASE_NAME]
    environment = {**os.environ, "TINKER_TELEMETRY": "0"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def seen(client: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the lines that the client has printed."""
    output, complaints = client.communicate(timeout=SECONDS)
    assert client.returncode == 0, output + complaints[-4000:]
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def test_a_client_goes_on_after_a_request_that_never_came(tmp_path: Path, tiny_model_dir: Path) -> None:
    data = tmp_path / "data"
    with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={tiny_model_dir}"], environment=SETTINGS) as process:
        keys = [make_tenant(data, name) for name in ("refused", "beside")]
        with RefusingProxy(process.base_url) as proxy:
            clients = [begin(url, key) for url, key in zip((proxy.base_url, process.base_url), keys, strict=True)]
            mine, theirs = map(seen, clients)
    assert mine["refused"] == "too large"
    assert mine["after_refusal"] == same(mine["before"]), "the step has never come, so the weights are as before"
    assert theirs["refused"] == ""
    assert theirs["after_refusal"] < theirs["before"]
    for one in (mine, theirs):
        assert "over the limit of 65536 bytes" in one["too_large"]
        assert one["after_too_large"] == same(one["after_refusal"])
