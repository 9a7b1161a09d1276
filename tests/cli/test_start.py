"""A command imports what it needs and nothing else: operators type ``weft --help`` often."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.pages.commands import commands

HEAVY = {"alembic", "fastapi", "httpx2", "numpy", "sqlalchemy", "torch", "transformers"}
PROGRAM = """
import json, sys
from typer.testing import CliRunner
from cli.main import app
ended = CliRunner().invoke(app, sys.argv[1:])
assert ended.exit_code == 0, (ended.output, ended.exception)
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


@pytest.mark.parametrize("words", [("--help",), ("serve", "--help"), ("top", "--help"), ("db", "--help")])
def test_help_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    assert HEAVY & set(json.loads(ended.stdout)) == set()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("weft ten", ["tenant"]),
        ("weft tenant su", ["suspend"]),
        ("weft tenant suspend cats --mode ", ["hold", "read_only", "blocked"]),
    ],
)
def test_the_shell_completes_groups_commands_and_words_of_options(line: str, offered: list[str]) -> None:
    typed = {
        "_WEFT_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - (not line.endswith(" "))),
    }
    ended = CliRunner().invoke(app, [], prog_name="weft", env=typed)
    assert (ended.exit_code, ended.output.split()) == (0, offered)


def test_every_group_tells_the_help_of_its_commands() -> None:
    assert all(command.help for _, command in commands())


def test_every_command_that_tells_an_outcome_tells_it_as_json() -> None:
    services = {f"weft {name}" for name in ("serve", "api", "worker", "pool", "beat", "up")}
    writers = {"weft grafana", "weft usage export", "weft model tiny", "weft db upgrade"}
    told = {words for words, command in commands() if any("--json" in one.opts for one in command.params)}
    assert {words for words, _ in commands()} - told == services | writers


def test_an_operators_keys_are_told_as_json(tmp_path: Path) -> None:
    def weft(*words: str) -> dict[str, Any]:
        ended = CliRunner().invoke(app, [*words, "--data", str(tmp_path)])
        assert ended.exit_code == 0, ended.output
        found: dict[str, Any] = json.loads(ended.stdout)
        return found

    assert CliRunner().invoke(app, ["db", "upgrade", "--data", str(tmp_path)]).exit_code == 0
    made = weft("--json", "operator", "create", "--note", "night")
    (listed,) = weft("operator", "list", "--json")["items"]
    assert made["secret"].startswith(made["prefix"])
    assert (listed["prefix"], listed["note"], listed["state"]) == (made["prefix"], "night", "live")
    assert weft("operator", "revoke", made["prefix"], "--json") == {"done": "revoked"}
    assert weft("operator", "list", "--json")["items"][0]["state"] == "revoked"
