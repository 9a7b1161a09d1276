"""``weft usage show``: a tenant's usage up to the last answer, told apart as asked, and its cost; no other tenant's."""

import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from testing.operator_command import weft


@pytest.fixture(scope="module")
def hour() -> datetime:
    """The hour in which the module's tests run: a price holds from the hour on in which it is added."""
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, hour: datetime) -> Path:
    """A data folder with prices and the usage of two tenants, in this hour and yesterday."""
    data = tmp_path_factory.mktemp("usage") / "data"
    for name in ("cats", "dogs"):
        weft(data, "tenant", "create", name)
    weft(data, "key", "create", "--tenant", "cats", "--note", "laptop")
    with closing(sqlite3.connect(data / "weft.db")) as database, database:
        for name, tokens in (("cats", 1_000_000), ("dogs", 77)):
            (tenant,) = database.execute("SELECT id FROM tenants WHERE name = ?", (name,)).fetchone()
            (number,) = database.execute("SELECT max(id) FROM api_keys WHERE tenant_id = ?", (tenant,)).fetchone()
            for used, kind, train, drawn in (
                (hour, "forward_backward", tokens, 0),
                (hour, "sample", 0, tokens),
                (hour - timedelta(days=1), "sample", 0, 5 * tokens),
            ):
                row = (tenant, f"{used:%Y-%m-%d %H:%M:%S.%f}", "s", "", number, "base", kind, None, 2, 1)
                sums = (*row, train, 10 if drawn else 0, 0, drawn)
                database.execute(f"INSERT INTO usage_hours VALUES ({', '.join('?' * len(sums))})", sums)
    return data


def shown(data: Path, *arguments: str) -> list[list[str]]:
    return [line.split("\t") for line in weft(data, "usage", "show", "--tenant", "cats", *arguments).splitlines()]


def test_this_hours_usage_is_shown_told_apart_by_people_s_names(data: Path, hour: datetime) -> None:
    now = ("--since", f"{hour:%Y-%m-%dT%H:%M}")
    assert shown(data, *now) == [["4", "2", "1000000", "10", "0", "1000000"]]
    ((project, *_),) = shown(data, *now, "--by", "project")
    assert project.endswith("(default)"), project
    ((key, *sums),) = shown(data, *now, "--by", "key")
    assert (key.endswith(" laptop)"), sums) == (True, ["4", "2", "1000000", "10", "0", "1000000"])
    by_kind = shown(data, *now, "--by", "kind", "--by", "session")
    assert [row[:2] for row in by_kind] == [["s", "sample"], ["s", "forward_backward"]], "the most tokens come first"


def test_hours_and_days_are_shown_by_themselves_and_the_end_is_left_out(data: Path, hour: datetime) -> None:
    since = ("--since", f"{hour - timedelta(days=1):%Y-%m-%dT%H:%M}")
    by_hour = shown(data, *since, "--every", "1h")
    told = [f"{one:%Y-%m-%dT%H:%MZ}" for one in (hour - timedelta(days=1), hour)]
    assert [(row[0], row[-1]) for row in by_hour] == list(zip(told, ["5000000", "1000000"], strict=True))
    past = shown(data, *since, "--before", f"{hour:%Y-%m-%dT%H:%M}")
    assert past == [["2", "1", "0", "10", "0", "5000000"]]
    assert shown(data, "--since", "2001-01-01", "--before", "2001-01-02") == []


def test_costs_are_told_with_their_currency_where_all_tokens_have_a_price(data: Path, hour: datetime) -> None:
    """Last of the module's: a price lasts."""
    for meter in ("train_tokens", "prompt_tokens"):
        weft(data, "price", "add", meter, "3")
    now = ("--since", f"{hour:%Y-%m-%dT%H:%M}", "--by", "kind")
    assert {row[0]: row[-1] for row in shown(data, *now)} == {"forward_backward": "3", "sample": "-"}
    weft(data, "price", "add", "sampled_tokens", "1.5")
    assert {row[0]: row[-1] for row in shown(data, *now)} == {"forward_backward": "3", "sample": "1.50003"}
    told = json.loads(weft(data, "usage", "show", "--tenant", "cats", *now, "--json"))
    assert [one["currency"] for one in told["items"]] == ["USD", "USD"]
