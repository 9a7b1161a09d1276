"""A message names only ways that exist: commands, settings, pages and routes."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import click
import typer
from fastapi.routing import APIRoute

from cli.main import app
from store.settings import Settings
from tests.api.test_request_bounds import routes
from tests.conftest import ROOT

PACKAGES = ("api", "cli", "contracts", "engine", "ledger", "migrations", "store", "telemetry", "tenants", "workers")
SETTINGS = {f"WEFT_{name.upper()}" for name in Settings.model_fields} | {
    "WEFT_CONFIG",
    "WEFT_ADMIN_URL",
    "WEFT_ADMIN_KEY",
}
PREFIXES = ("", "/api/v1", "/v1", "/api/weft/v1")


@cache
def texts() -> frozenset[tuple[str, str]]:
    """Every text in the code, docstrings included, with its file. A formatted text has … in place of its values."""
    return frozenset(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                yield file.name, "".join(str(part) for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield file.name, node.value


def commands(group: click.Command, above: str = "weft") -> Iterator[str]:
    """The full names of a command and of all below it."""
    yield above
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{above} {name}")


def unknown(pattern: str, known: set[str]) -> set[tuple[str, str]]:
    """Return the unknown names in texts, with the file."""
    found = re.compile(pattern)
    return {(file, name) for file, text in texts() for name in found.findall(text) if name not in known}


def test_every_command_that_a_message_names_exists() -> None:
    known = set(commands(typer.main.get_command(app)))
    assert len(known) > 40
    named = {(file, name) for file, text in texts() for name in re.findall(r"`(weft [a-z]+(?: [a-z-]+)?)", text)}
    # The second word of a command without subcommands is an argument.
    wrong = {
        (file, name) for file, name in named if name not in known and name.rpartition(" ")[0] not in known - {"weft"}
    }
    groups = {name.rpartition(" ")[0] for name in known if name.count(" ") == 2}
    wrong |= {(file, name) for file, name in named if name not in known and name.rpartition(" ")[0] in groups}
    assert wrong == set()


def test_every_setting_that_a_message_names_exists() -> None:
    assert unknown(r"\bWEFT_[A-Z_]+[A-Z]\b", SETTINGS) == set()


def test_every_page_that_a_message_names_exists() -> None:
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert unknown(r"docs/[\w/-]+\.md", pages) == set()


def test_every_route_that_a_message_names_exists() -> None:
    known = {
        f"{method} {prefix}{route.path}" for route in routes() for method in _methods(route) for prefix in PREFIXES
    }
    known |= {f"GET /{theirs}" for theirs in ("is_paused", "is_sleeping", "server_info", "version")}  # of a vLLM server
    assert unknown(r"\b((?:GET|POST|PUT|DELETE) /[\w/{}-]+[\w}])", known) == set()


def _methods(route: APIRoute) -> set[str]:
    return set(route.methods)
