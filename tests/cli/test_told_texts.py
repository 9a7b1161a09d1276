"""Texts that commands tell: tenants' own without effect on the terminal, unknown names refused, budgets by their payer."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cli import usage
from cli.tables import Table, harmless
from contracts.errors import Unavailable
from tests.cli.invoked import weft

HOSTILE = "a\x1b[2J\x9b1m\r\nb\u2028c\u202ed"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("cats", "dogs"):
        weft(tmp_path / "data", "tenant", "create", name)
    return tmp_path / "data"


def changed(data: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(data / "weft.db")) as database, database:
        database.execute(statement, values)


def new_key(data: Path, tenant: str) -> str:
    """Return the first part of a new key."""
    return weft(data, "key", "create", "--tenant", tenant).stdout.split()[-1][:16]


def test_tenants_texts_neither_drive_the_terminal_nor_forge_a_row(data: Path) -> None:
    """A tab is what parts a line's cells: in a table's cell it is written out, too."""
    changed(data, "UPDATE api_keys SET note = ? WHERE id = 1", HOSTILE)
    told = weft(data, "key", "list", "--tenant", "cats").stdout
    assert told.count("\n") == 1
    assert told.endswith("\ta\\x1b[2J\\x9b1m\\r\\nb\\u2028c\\u202ed\n")
    assert Table(("one", "two"), [("a\tb\nc", "d")]).lines == ["a\\tb\\nc\td"]
    assert harmless("Kätzchen\t猫 'n'") == "Kätzchen\t猫 'n'"
    refused = weft(data, "tenant", "show", HOSTILE)
    assert (refused.exit_code, "\x1b" in refused.stderr, refused.stderr.count("\n")) == (1, False, 1)


@pytest.mark.parametrize("command", ["tenant usage", "operation list"])
def test_a_list_of_an_unknown_tenant_is_refused_as_no_empty_one(data: Path, command: str) -> None:
    wrong = weft(data, *command.split(), "--tenant", "cat")
    assert (wrong.exit_code, "no tenant is named 'cat'" in wrong.stderr) == (1, True)
    assert weft(data, *command.split(), "--tenant", "cats").exit_code == 0


def test_a_budget_of_a_key_that_shares_one_is_told_with_the_key_that_pays(data: Path) -> None:
    first, other = new_key(data, "cats"), new_key(data, "dogs")
    weft(data, "key", "rotate", first)
    with closing(sqlite3.connect(data / "weft.db")) as database:
        named = "SELECT id FROM api_keys WHERE prefix = ?"
        (payer,) = database.execute(named, (first,)).fetchone()
        heir, prefix = database.execute("SELECT id, prefix FROM api_keys WHERE budget_key = ?", (payer,)).fetchone()
    told = weft(data, "tenant", "budget", "cats", "--day", "7", "--of-key", prefix).stdout.splitlines()
    assert told[:2] == ["set", f"of key {payer}, whose budgets key {heir} shares"]
    assert told[2].split("\t")[2:5] == ["day", "7", "0"]
    assert len(weft(data, "tenant", "budget", "dogs", "--day", "7", "--of-key", other).stdout.splitlines()) == 2


@pytest.mark.parametrize("ended", ["revoked_at", "expires_at", None])
def test_no_login_link_is_made_for_a_key_that_has_ended(data: Path, ended: str | None) -> None:
    key = new_key(data, "cats")
    if ended is not None:
        past = datetime.now(UTC) - timedelta(hours=1)
        changed(data, f"UPDATE api_keys SET {ended} = ? WHERE prefix = ?", f"{past:%Y-%m-%d %H:%M:%S.%f}", key)
    opened = weft(data, "ui", "open", key)
    assert opened.exit_code == (0 if ended is None else 1), opened.output
    assert ("has ended" in opened.stderr) == (ended is not None)


def test_an_export_is_in_the_audit_log_before_its_first_line(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who stops the document, or meets a failure in it, has read of it all the same."""

    def broken(*_: object) -> str:
        raise Unavailable("stopped")

    monkeypatch.setattr(usage, "header", broken)
    day = datetime.now(UTC).date() - timedelta(days=1)
    assert weft(data, "usage", "export", "--tenant", "cats", "--since", str(day)).exit_code != 0
    with closing(sqlite3.connect(data / "weft.db")) as database:
        told = database.execute("SELECT count(*) FROM audit_entries WHERE action = 'usage_read'").fetchone()
    assert told == (1,)
