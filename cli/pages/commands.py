"""Page of every ``weft`` command with its arguments and options, rendered from the command line's own declarations."""

from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import typer

from cli.main import app
from cli.pages.markdown import GENERATED, prose, table

_HEAD = f"""# Commands

{GENERATED.format(source="cli/main.py")}

Every command reads the [settings](settings.md); the options here win over them. `weft COMMAND --help` shows the same.

Commands of operators work on the database of the data folder, or over the [admin API](admin-routes.md) of a running service:

| before the command | meaning |
|---|---|
| `--url URL`, or `WEFT_ADMIN_URL` | address of the admin API; an explicit `--data` wins |
| `--key KEY`, or `WEFT_ADMIN_KEY` | an operator's key for it; the variable keeps it out of the list of processes |
| `--json` | print the record as JSON; also after the command |
| `--install-completion` | install completion for your shell |

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | refused: the message says what to change |
| 2 | wrong usage, a setting with a wrong value, or a data folder without a database |
| 3 | the service cannot be reached, fails, or answers what the command cannot read |

## Shared options

"""
_SHARED = ("base_model", "data", "host", "port", "as_json")
"""Options told once for all commands."""


def render() -> str:
    """Return the page."""
    every = list(commands())
    shared = {one.name: one for _, command in every for one in command.params if one.name in _SHARED}
    told = table(("option", "meaning"), [(f"`{_shown(shared[name])}`", prose(shared[name].help)) for name in _SHARED])
    return _HEAD + told + "\n" + "\n".join(_section(words, command) for words, command in every)


def commands() -> Iterator[tuple[str, Any]]:
    """Yield each command that does something, with the words that call it, in the order of ``weft --help``."""
    yield from _below("weft", typer.main.get_command(app))


def _below(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield words, command
        return
    for name, child in children.items():
        yield from _below(f"{words} {name}", child)


def _section(words: str, command: Any) -> str:
    parameters = [parameter for parameter in command.params if parameter.name not in ("help", *_SHARED)]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    usage = " ".join([words, *(_argument(one) for one in arguments)])
    rows = [(f"`{_shown(one)}`", _default(one), prose(getattr(one, "help", None) or "")) for one in parameters]
    own = "\n" + table(("argument or option", "default", "meaning"), rows) if rows else ""
    shared = ", ".join(f"`{one.opts[0]}`" for one in command.params if one.name in _SHARED)
    meaning = prose(command.help or "") + (f" Shared options: {shared}." if shared else "")
    return f"## `{usage}`\n\n{meaning}\n{own}"


def _argument(parameter: Any) -> str:
    return str(parameter.name).upper()


def _shown(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return _argument(parameter)
    return f"{parameter.opts[0]} {parameter.metavar or _values(parameter.type_descriptor.annotation)}"


def _values(kind: Any) -> str:
    """Return an enum's or a literal's values, or the name of the type."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return "|".join(str(one.value) for one in kind) if issubclass(kind, Enum) else kind.__name__.upper()


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = getattr(parameter.default, "value", parameter.default)
    return "" if default in (None, "") else f"`{default}`"
