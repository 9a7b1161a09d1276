"""A command line that a test runs in its own process."""

import os
from pathlib import Path

from typer.testing import CliRunner, Result

from cli.main import app


def weft(data: Path, *arguments: str) -> Result:
    """Run a command on a data folder."""
    mask = os.umask(0o077)
    try:
        return CliRunner().invoke(app, [*arguments, "--data", str(data)])
    finally:
        # A command sets the mask of its process for good.
        os.umask(mask)
