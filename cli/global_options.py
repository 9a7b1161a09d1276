"""Options before the command's name, which every command of operators reads."""

from dataclasses import dataclass
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print the record as JSON.")]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", envvar="WEFT_ADMIN_URL", help="Address of a service's admin API (WEFT_ADMIN_PORT)."),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="WEFT_ADMIN_KEY", help="An operator's key for --url (`weft operator create`)."),
]


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """Options before the command's name."""

    url: str | None = None
    key: str | None = None
    as_json: bool = False


def options_of(context: typer.Context) -> GlobalOptions:
    """Return the options that were given before the command's name."""
    found = context.find_root().obj
    return found if isinstance(found, GlobalOptions) else GlobalOptions()
