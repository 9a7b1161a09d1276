"""Runs ``weft`` commands in this process, as an operator beside a running service would."""

import os
from collections.abc import Mapping
from pathlib import Path

from typer.testing import CliRunner


def weft(data: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a command on the service's data folder and return what it prints. Raises ``RuntimeError`` when it fails."""
    from cli.main import app

    mask = os.umask(0o077)
    try:
        ended = CliRunner().invoke(app, [*arguments, "--data", str(data)], env=dict(environment or {}))
    finally:
        # A command sets the mask of its process for good.
        os.umask(mask)
    if ended.exit_code != 0:
        raise RuntimeError(f"weft {' '.join(arguments)}: {ended.output.strip() or ended.exception!r}")
    return ended.output
