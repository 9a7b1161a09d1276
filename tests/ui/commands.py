"""Runs ``weft`` commands beside the tests' service."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from testing import operator_command


def weft(data: Path, *arguments: str) -> str:
    """Run a command on the service's data folder. In a thread of its own: Playwright has an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(operator_command.weft, data, *arguments).result()
