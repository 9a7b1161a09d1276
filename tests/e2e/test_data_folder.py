"""The data folder of a service that has worked holds nothing whose end nobody has named."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.raw_client import RawClient
from workers.housekeeping.retention import RETENTION_OF_FOLDERS


def test_every_folder_names_its_end(service: Service, run_flow: Callable[..., dict[str, Any]]) -> None:
    """A new folder gets a line in ``workers/housekeeping/retention.py``, and one on ``docs/explanation/retention.md``."""
    run_flow(service.base_url, service.key)
    check_folders(service)


def check_folders(service: Service) -> None:
    """Fail for a folder of a service that has worked which names no end."""
    found = {entry.name for entry in service.data.iterdir() if entry.is_dir()}
    assert "checkpoints" in found
    assert found <= set(RETENTION_OF_FOLDERS)


def test_a_second_service_on_the_folder_is_refused_and_the_first_one_serves_on(service: Service) -> None:
    """A second one would take runs whose requests it is not told of, and remove versions that the first one samples."""
    words = ["serve", "--data", str(service.data), "--base-model", f"{BASE_NAME}={service.model}", "--port", "0"]
    second = subprocess.run([sys.executable, "-m", "cli.main", *words], capture_output=True, text=True, timeout=120)
    assert second.returncode == 1
    assert f"(pid {service.process.pid}) has this data folder" in second.stderr
    assert "Traceback" not in second.stderr
    neighbour = RawClient(service.base_url, service.other_key)
    assert neighbour.http.get("/get_server_capabilities").status_code == 200
    neighbour.close()
