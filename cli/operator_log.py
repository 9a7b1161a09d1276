"""Security events of operators' commands, which work on the database without any API in between."""

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager

from cli.command_line import current_command
from contracts.errors import WeftError
from store.database import this_host
from store.settings import Settings
from telemetry.security import Outcome, SecurityEvent, SecurityRecord, note
from telemetry.security_file import security_files


def operator() -> str:
    """Return who runs this command: user and host, and the user who became this one by ``sudo``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a number without a name.
        user = f"uid-{os.getuid()}"
    before = os.environ.get("SUDO_USER")
    return f"{user}@{this_host()}" + (f" (sudo by {before})" if before else "")


@contextmanager
def noted_command(settings: Settings) -> Iterator[None]:
    """Note the running command with its arguments once the block has ended, and how it ended."""
    with security_files(settings.data_dir, "cli", this_host()):
        outcome: Outcome = "failed"
        try:
            yield
            outcome = "done"
        except WeftError:
            outcome = "refused"
            raise
        finally:
            _note_command(outcome)


def _note_command(outcome: Outcome) -> None:
    command = current_command()
    if command is not None:
        note(SecurityRecord(event=SecurityEvent.COMMAND, outcome=outcome, actor=operator(), resource=command))
