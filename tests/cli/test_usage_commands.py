"""``weft price`` and ``weft usage`` on a service's database: prices are added, a day is counted again, a bill is exported."""

import re
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.cli.invoked import weft


def test_a_price_is_added_once_and_a_wrong_sum_makes_verify_exit_with_one(tmp_path: Path) -> None:
    data = tmp_path / "data"
    weft(data, "tenant", "create", "cats")
    added = weft(data, "price", "add", "train_tokens", "3.30")
    assert added.stdout.startswith("train_tokens\t*\t3.3\tUSD\t"), added.stderr
    assert weft(data, "price", "add", "train_tokens", "4").exit_code == 1
    assert weft(data, "price", "list").stdout == added.stdout
    day = datetime.now(UTC).date() - timedelta(days=1)
    right = weft(data, "usage", "verify", "--day", str(day))
    assert (right.exit_code, "0 sums differ" in right.stdout) == (0, True)
    with sqlite3.connect(data / "weft.db") as database:
        (tenant,) = database.execute("SELECT id FROM tenants WHERE name = 'cats'").fetchone()
        database.execute("INSERT INTO usage_days VALUES (?, ?, 'base', 'sample', 1, 5)", (tenant, str(day)))
    wrong = weft(data, "usage", "verify", "--day", str(day))
    assert (wrong.exit_code, "cats\tusage_days\ttokens\t5 told\t0 counted" in wrong.stdout) == (1, True)
    exported = weft(data, "usage", "export", "--tenant", "cats", "--since", str(day))
    assert (exported.exit_code, exported.stdout[:10]) == (0, "BilledCost")
    assert re.fullmatch(r"hours from \S+Z on may still change and are left out\n", exported.stderr), exported.stderr
    past = weft(data, "usage", "export", "--tenant", "cats", "--since", str(day), "--before", f"{day}T01:00")
    assert (past.exit_code, past.stderr) == (0, ""), "nothing is left out"


def test_a_budget_is_told_with_what_is_spent_of_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    weft(data, "tenant", "create", "cats")
    weft(data, "project", "create", "paper", "--tenant", "cats")
    others = weft(data, "tenant", "budget", "cats", "--day", "7", "--month", "9").stdout.splitlines()
    assert [line.split("\t")[:5] for line in others[1:]] == [
        ["budget", "tenant", "day", "7", "0"],
        ["budget", "tenant", "month", "9", "0"],
    ]
    own = weft(data, "tenant", "budget", "cats", "--day", "5", "--of-project", "paper").stdout.splitlines()
    assert [line.split("\t")[:5] for line in own[1:]] == [["budget", "project paper", "day", "5", "0"]]
    assert weft(data, "tenant", "budget", "cats", "--day", "none").stdout == "set\n"


def test_a_replica_that_no_process_reports_is_directed_with_a_warning(tmp_path: Path) -> None:
    data = tmp_path / "data"
    weft(data, "tenant", "create", "cats")
    with sqlite3.connect(data / "weft.db") as database:
        database.execute("INSERT INTO base_weights VALUES ('my/tiny', ?, '2026-01-01 00:00:00')", ("0" * 64,))
    unknown = weft(data, "replica", "drain", "nosuch", "--base", "no/such")
    assert (unknown.exit_code, "no process serves a base model 'no/such'" in unknown.stderr) == (1, True)
    done = weft(data, "replica", "drain", "nosuch", "--base", "my/tiny")
    assert (done.exit_code, done.stdout) == (0, "nosuch\tdrain\n")
    assert "no process reports a replica of that name" in done.stderr
    assert weft(data, "replica", "list").stdout.startswith("my/tiny\tnosuch\tdirected, not seen\t")


def test_verify_says_from_when_on_operations_are_counted_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    weft(data, "tenant", "create", "cats")
    today = datetime.now(UTC).date()
    unended = weft(data, "usage", "verify", "--day", str(today)).stdout
    assert "0 operations counted again from" in unended
    assert f"{today}: not over; " in unended, "what ended lately is in no sum"
    long_ago = weft(data, "usage", "verify", "--day", str(today - timedelta(days=90))).stdout
    assert "not over" not in long_ago
    assert "no operation counted again, since none is surely kept" in long_ago
    last = weft(data, "usage", "verify", "--day", "9999-12-31")
    assert (last.exit_code, "query.day" in last.stderr) == (1, True), "no day comes after it"
