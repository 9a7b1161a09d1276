"""The data folder of a service that has worked holds nothing whose end nobody has named."""

from collections.abc import Callable
from typing import Any

from tests.e2e.conftest import Service
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
