"""Runs ``weft`` commands in this process, as an operator beside a running service would."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from typer.testing import CliRunner

_ALONE = Lock()
"""Held by the command that runs: its environment and its output are the process's."""


def weft(data: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a command on the service's data folder and return what it prints. Raises ``RuntimeError`` when it fails.

    It runs in a thread of its own, because the caller's may have an event loop. Commands run one after the other.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run, [*arguments, "--data", str(data)], dict(environment or {})).result()


def weft_over_http(url: str, key: str, *arguments: str) -> str:
    """Run a command over the admin API at ``url`` with an operator's key, as ``weft`` does on the data folder."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run, [*arguments], {"WEFT_ADMIN_URL": url, "WEFT_ADMIN_KEY": key}).result()


def _run(command: list[str], environment: dict[str, str]) -> str:
    from cli.main import app

    with _ALONE:
        mask = os.umask(0o077)
        try:
            ended = CliRunner().invoke(app, command, env=environment)
        finally:
            # A command sets the mask of its process for good.
            os.umask(mask)
    if ended.exit_code != 0:
        raise RuntimeError(f"weft {' '.join(command)}: {ended.output.strip() or ended.exception!r}")
    return ended.output
