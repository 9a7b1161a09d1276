"""Options that many subcommands share, and messages for wrong values."""

import os
from collections.abc import Callable
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.errors import WeftError

if TYPE_CHECKING:
    from store.settings import Settings

DataOption = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Data folder (WEFT_DATA_DIR; default: .weft).")
]
BaseOption = Annotated[
    list[str] | None,
    typer.Option("--base-model", metavar="[NAME=]PATH", help="A Hugging Face model folder to serve; repeatable."),
]
HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on (WEFT_HOST; default: 127.0.0.1).")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=200, help="Most lines.")]
AfterOption = Annotated[str | None, typer.Option("--after", help="Id of the last line of the page before.")]
PortOption = Annotated[
    int | None, typer.Option("--port", help="Port to listen on, 0 for a free one (WEFT_PORT; default: 8642).")
]


def load_settings(
    *,
    data: Path | None = None,
    base_models: list[str] | None = None,
    host: str | None = None,
    port: int | None = None,
) -> "Settings":
    """Return the settings: file and environment, overridden by the options given. Exit with 2 and a message for a wrong value.

    A variable that is misspelt has no effect, so it is told on standard error.
    """
    # Imported late, so that `weft --help` stays quick.
    from pydantic import ValidationError

    from store.settings import Settings, unknown_variables

    for name, nearest in unknown_variables(os.environ).items():
        meant = "" if nearest is None else f"; did you mean {nearest}?"
        typer.echo(f"weft: {name} is no setting and has no effect{meant}", err=True)
    given: dict[str, Any] = {"data_dir": data, "base_models": base_models or None, "host": host, "port": port}
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except (FileNotFoundError, TOMLDecodeError) as error:
        typer.echo(f"weft: settings file: {error}", err=True)
        raise typer.Exit(2) from error
    except ValidationError as error:
        for problem in error.errors():
            field = ".".join(str(part) for part in problem["loc"]) or "settings"
            typer.echo(f"weft: {field}: {problem['msg']} (environment: WEFT_{field.upper()})", err=True)
        raise typer.Exit(2) from error


def run_or_explain(work: Callable[[], Any]) -> Any:
    """Run ``work`` and return its result; print a ``WeftError`` as one line on standard error and exit with 1."""
    try:
        return work()
    except WeftError as error:
        typer.echo(f"weft: {error.message}", err=True)
        raise typer.Exit(1) from error
