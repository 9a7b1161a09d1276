"""Command line of this process, as records of an operator's acts tell it."""

from collections.abc import Sequence
from contextvars import ContextVar

from contracts.secrets import mask_secrets

_MOST_CHARACTERS = 500
_command: ContextVar[str | None] = ContextVar("weft_command", default=None)


def begin_command(arguments: Sequence[str]) -> None:
    """Remember the command line of this process, whose operator acts from here on."""
    _command.set(mask_secrets(" ".join(["weft", *arguments]))[:_MOST_CHARACTERS])


def current_command() -> str | None:
    """Return the command line of this process without secrets, None outside of a command."""
    return _command.get()
