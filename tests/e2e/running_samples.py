"""Number of sequences that a service draws now, and the end of one of its samples."""

import sqlite3
import time
from collections.abc import Callable

import psutil

from tests.e2e.conftest import Service
from tests.e2e.sample_stream import DEADLINE_SECONDS
from tests.unix_http import unix_client


def rows(service: Service, query: str, *values: object) -> list[tuple[object, ...]]:
    """Return the rows of a query of the service's database."""
    with sqlite3.connect(service.data / "weft.db") as database:
        found = database.execute(query, values).fetchall()
    database.close()
    return found


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until ``holds``."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def running(service: Service) -> int:
    """Sequences that the service's vLLM server runs by its own metrics, or samples in flight in a service without one."""
    found = _of_vllm(service, "vllm:num_requests_running")
    return len(rows(service, "SELECT 1 FROM samples_in_flight")) if found is None else found


def drawn_by_vllm(service: Service) -> int:
    """Tokens that the service's vLLM server has drawn since its start."""
    found = _of_vllm(service, "vllm:generation_tokens_total")
    assert found is not None
    return found


def _of_vllm(service: Service, metric: str) -> int | None:
    """The sum of a metric of the service's vLLM server; None for a service without one."""
    for child in psutil.Process(service.process.pid).children(recursive=True):
        line = child.cmdline()
        if "--uds" in line:
            with unix_client(line[line.index("--uds") + 1]) as http:
                lines = http.get("/metrics").raise_for_status().text.splitlines()
            return int(sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(metric)))
    return None
