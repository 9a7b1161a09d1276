"""Declaration of operators' commands: each is written once, and works over HTTP and on the database, as text and as JSON.

Exit codes: 0 done, 1 refused, 2 wrong usage, 3 the service cannot be reached, fails, or cannot be understood.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate

import typer
from pydantic import BaseModel, ConfigDict, ValidationError

from api.wire.request_model import describe_problems
from cli.global_options import JsonOption, options_of
from cli.options import DataOption, load_settings, run_or_explain
from cli.tables import Table, harmless, print_tables
from contracts.errors import InvalidRequest, Unavailable, WeftError
from store.settings import Settings

if TYPE_CHECKING:
    from cli.admin_client import AdminClient, Door

REFUSED, UNREACHABLE = 1, 3
"""Exit codes of a refusal, and of a service that does not answer, fails, or cannot be understood."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Outcome of a command: the record, and the same as lines for people. A terminal gets ``tables`` in place of lines."""

    record: BaseModel
    lines: Sequence[str]
    is_failure: bool = False
    tables: Sequence[Table] = ()

    @classmethod
    def of(cls, record: BaseModel, *tables: Table) -> "Shown":
        """Return an outcome whose lines are the rows of its tables."""
        return cls(record, [line for table in tables for line in table.lines], tables=tables)


class Done(BaseModel):
    """Outcome of a command that changes something which has no record any more."""

    model_config = ConfigDict(frozen=True)

    done: str


def admin_command(
    app: typer.Typer, name: str, *, may_begin: bool = False
) -> Callable[[Callable[Concatenate["AdminClient", ...], Shown]], Callable[..., None]]:
    """Return a decorator that makes a function of the admin API a command, with ``--data`` and ``--json`` beside its own.

    ``may_begin``: the command makes the database of a folder that is named and has none.
    """

    def declare(work: Callable[..., Shown]) -> Callable[..., None]:
        def run(*, context: typer.Context, data: Path | None, as_json: bool, **given: Any) -> None:
            with ends_explained():
                # Imported late, so that `weft --help` stays quick.
                from cli.admin_client import open_admin

                with open_admin(door_of(context, data), may_begin=may_begin) as admin:
                    shown = work(admin, **given)
            show(shown, context, as_json=as_json)

        return _declared(app, name, work, run)

    return declare


def local_command(
    app: typer.Typer, name: str, *, needs: str
) -> Callable[[Callable[Concatenate[Settings, ...], Shown]], Callable[..., None]]:
    """Return a decorator that makes a function of the settings a command with ``--data`` and ``--json``.

    It works on the service's machine only, for what it ``needs`` there.
    """

    def declare(work: Callable[..., Shown]) -> Callable[..., None]:
        def run(*, context: typer.Context, data: Path | None, as_json: bool, **given: Any) -> None:
            check_is_here(context, data, needs)
            shown = run_or_explain(lambda: work(load_settings(data=data), **given))
            show(shown, context, as_json=as_json)

        return _declared(app, name, work, run)

    return declare


def _declared(app: typer.Typer, name: str, work: Callable[..., Shown], run: Callable[..., None]) -> Callable[..., None]:
    """Make ``run`` the command, with the options of ``work`` after its first parameter and those that all commands share."""
    own = list(inspect.signature(work).parameters.values())[1:]
    shared = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        inspect.Parameter("data", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=DataOption),
        inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption),
    ]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own] + shared
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__doc__, run.__name__ = work.__doc__, work.__name__
    app.command(name)(run)
    return run


def door_of(context: typer.Context, data: Path | None) -> "Door":
    """Return the way to the service that the command line asks for: an explicit ``--data`` wins over the environment."""
    from cli.admin_client import Door

    options = options_of(context)
    return Door(None if data is not None else options.url, options.key, data)


def check_is_here(context: typer.Context, data: Path | None, needs: str) -> None:
    """Exit with 1 when the command line asks for a service elsewhere, where a command cannot work that ``needs`` this machine."""
    if door_of(context, data).url is not None:
        group = "" if context.parent is None else context.parent.info_name
        with ends_explained():
            raise InvalidRequest(
                f"`weft {group} {context.info_name}` does not work with --url: it needs {needs}; run it on the service's "
                "machine, with --data"
            )


@contextmanager
def ends_explained() -> Iterator[None]:
    """Print a ``WeftError``, or why a body cannot be built, as one line on standard error, and exit with its code."""
    try:
        yield
    except (ValidationError, WeftError) as error:
        told = error.message if isinstance(error, WeftError) else describe_problems(error.errors())
        typer.echo(harmless(f"weft: {told}"), err=True)
        raise typer.Exit(UNREACHABLE if isinstance(error, Unavailable) else REFUSED) from error


def show(shown: Shown, context: typer.Context, *, as_json: bool) -> None:
    """Print the outcome, as JSON if that is asked for before or after the command's name. Exit with 1 if it is a failure."""
    if as_json or options_of(context).as_json:
        typer.echo(shown.record.model_dump_json())
    elif not print_tables(shown.tables):
        for line in shown.lines:
            typer.echo(harmless(line))
    if shown.is_failure:
        raise typer.Exit(REFUSED)
