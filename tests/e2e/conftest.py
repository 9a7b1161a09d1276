"""A real service process, a repeating proxy before it, and both SDKs as subprocesses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from testing.operator_command import weft
from testing.service_process import ServiceProcess
from tests.conftest import ROOT, missing_service

BASE_NAME = "weft/tiny"
FLOW = Path(__file__).with_name("sdk_flow.py")
FLOW_SECONDS = 240
SDK_FOLDERS = Path(sys.prefix) / "sdks"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SEQUENCE_TOKENS = 9
"""Tokens of the one sequence that clients of ``exact`` train on."""
POOL_SAMPLES = 32
"""Samples that the services' pools hold: so few that a test can send more."""
VLLM_ENVIRONMENT = {
    "WEFT_POOL_SAMPLES": str(POOL_SAMPLES),
    "WEFT_VLLM_REPLICAS": "1",
}
"""A service that samples on one vLLM server, which it starts as users have it start one: by that number alone."""


@dataclass(frozen=True)
class Service:
    """A running service and keys of two tenants."""

    process: ServiceProcess
    data: Path
    model: Path
    key: str
    other_key: str

    @property
    def base_url(self) -> str:
        """URL at which the service listens."""
        return self.process.base_url


def make_tenant(data: Path, name: str) -> str:
    """A tenant's key, by the admin command."""
    return weft(data, "tenant", "create", name).strip()


def make_key(data: Path, tenant: str, *, role: str) -> str:
    """Another key of a tenant, by the admin command."""
    return weft(data, "key", "create", "--tenant", tenant, "--role", role).strip()


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Service]:
    """``weft serve`` on the tiny base, for tests that leave it running."""
    data = tmp_path_factory.mktemp("service") / "data"
    environment = {"WEFT_POOL_SAMPLES": str(POOL_SAMPLES)}
    with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={tiny_model_dir}"], environment=environment) as process:
        yield Service(process, data, tiny_model_dir, make_tenant(data, "first"), make_tenant(data, "second"))


@pytest.fixture(scope="package")
def exact(tmp_path_factory: pytest.TempPathFactory, service: Service) -> Iterator[Service]:
    """Another service on the same base, whose polls are answered soon and whose passes have room for one sequence.

    A processor may round a sequence otherwise beside another one: alone, the weights of two stories can be equal to the bit.
    """
    data = tmp_path_factory.mktemp("exact") / "data"
    environment = {"WEFT_POLL_HOLD": "PT1S", "WEFT_PASS_TOKEN_BUDGET": str(SEQUENCE_TOKENS)}
    with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={service.model}"], environment=environment) as process:
        yield replace(service, process=process, data=data)


@pytest.fixture(scope="package")
def vllm_service(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Service]:
    """``weft serve`` that samples on a real vLLM server of its own, for tests that leave it running."""
    if not VLLM_PYTHON.exists():
        missing_service("vLLM", "no .venv-vllm; run: make vllm")
    data = tmp_path_factory.mktemp("vllm") / "data"
    bases = [f"{BASE_NAME}={tiny_model_dir}"]
    with ServiceProcess(data=data, base_models=bases, environment=VLLM_ENVIRONMENT) as process:
        yield Service(process, data, tiny_model_dir, make_tenant(data, "first"), make_tenant(data, "second"))


@pytest.fixture(scope="module", params=["torch", "vllm"])
def either(request: pytest.FixtureRequest) -> Service:
    """A service that samples in its own process, and one that samples on vLLM."""
    found: Service = request.getfixturevalue("service" if request.param == "torch" else "vllm_service")
    return found


@pytest.fixture(scope="session")
def run_flow() -> Callable[..., dict[str, Any]]:
    """Run ``sdk_flow.py``, or another script, with a given SDK version against a URL."""

    def run(base_url: str, api_key: str, *, sdk: str | None = None, script: Path = FLOW) -> dict[str, Any]:
        environment = {**os.environ, "TINKER_TELEMETRY": "0"}
        if sdk not in (None, version("tinker")):
            folder = SDK_FOLDERS / f"tinker-{sdk}"
            if not folder.is_dir():
                pytest.fail(
                    f"the SDK {sdk} is not unpacked in {folder.name}; run `make setup`, or `make sdk-matrix` for all"
                )
            environment["PYTHONPATH"] = str(folder)
        finished = subprocess.run(
            [sys.executable, str(script), base_url, api_key, BASE_NAME],
            capture_output=True,
            text=True,
            timeout=FLOW_SECONDS,
            env=environment,
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        seen: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
        return seen

    return run
