"""Searches of runs: by the names and values of the metadata, alike on both databases, in bounded pieces."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, insert

from store.tables import Run
from tenants import run_lists
from tenants.run_lists import RunFilter, page_of_runs
from tests.tenants.loop_turns import neighbour
from tests.tenants.usage_books import NOON, Books


async def make_runs(books: Books, who: int, metadata: list[dict[str, str] | None]) -> None:
    """Insert a run for each metadata, one a second; its id ends with its place."""
    same: dict[str, Any] = {"tenant_id": books.tenants[who], "session_id": books.sessions[who], "base_model": "tiny"}
    same |= {"rank": 1, "alpha": 1.0, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": True}
    rows = [
        same
        | {
            "id": f"{who}-{place}",
            "model_seq_id": place,
            "user_metadata": told,
            "created_at": NOON + timedelta(seconds=place),
            "last_request_at": NOON,
        }
        for place, told in enumerate(metadata)
    ]
    async with books.database.write() as transaction:
        await transaction.execute(insert(Run), rows)


async def places(books: Books, *, who: int = 0, most: int = 100, **which: Any) -> list[int]:
    """Return the places of the runs on every page of the search."""
    found, cursor = [], None
    while True:
        async with books.database.read() as session:
            owned = RunFilter(owner=books.tenants[who], **which)
            page = await page_of_runs(session, owned, most=most, cursor=cursor)
        found += [int(one.run.id.partition("-")[2]) for one in page.runs]
        if (cursor := page.next) is None:
            return found


@pytest.mark.parametrize("name", ["é", "a\\b", "a.b", 'a"b', '"', "a b", "$", "[0]", "日本", "🐈", "it's"])
async def test_an_entry_with_any_name_is_found(books: Books, name: str) -> None:
    await make_runs(books, 0, [{name: "yes"}, {name: "no"}, {"other": "yes"}, None, {}])
    await make_runs(books, 1, [{name: "yes"}])
    assert await places(books, metadata=(name, "yes")) == [0]
    assert await places(books, text=name) == [1, 0]
    assert await places(books, metadata=(name, "ye")) == []


async def test_a_search_reads_names_and_values_and_not_what_json_adds(books: Books) -> None:
    await make_runs(books, 0, [None, {}, {"colour": "grün"}, {"q": 'say "null" \\ {now}'}])
    await make_runs(books, 1, [{"colour": "grün"}])
    assert await places(books, text="COLOUR") == [2]
    assert await places(books, text="grün") == [2]
    assert await places(books, text="null") == await places(books, text='"null"') == [3]
    assert await places(books, text="\\") == await places(books, text="{") == [3]
    for punctuation in ('": "', "{}", '"}', "\\u00fc", "nul,"):
        assert await places(books, text=punctuation) == []


async def test_a_search_of_many_runs_gives_others_their_turn(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lists, "PIECE", 50)
    await make_runs(books, 0, [{"n": "old" if place < 3 else "new"} for place in range(1000)])
    async with neighbour() as beside, books.database.read() as session:
        before = beside.turns
        page = await page_of_runs(session, RunFilter(owner=books.tenants[0], text="old"), most=10)
        assert beside.turns - before >= 1000 // 50 - 1
    assert [one.run.id for one in page.runs] == ["0-2", "0-1", "0-0"]


async def test_pages_of_a_search_have_every_run_once(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lists, "PIECE", 7)
    monkeypatch.setattr(run_lists, "SEARCHED", 21)
    await make_runs(books, 0, [{"n": "yes" if place % 5 == 0 else "no"} for place in range(100)])
    await make_runs(books, 1, [{"n": "yes"}])
    wanted = list(range(95, -1, -5))
    for most in (1, 2, 3, 100):
        assert await places(books, most=most, metadata=("n", "yes")) == wanted
    assert await places(books, metadata=("n", "yes"), base_model="other") == []


async def test_a_piece_is_all_that_one_statement_searches(books: Books) -> None:
    await make_runs(books, 0, [{"n": "no"}] * 600)
    sent: list[str] = []
    engine = books.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
    assert await places(books, text="yes") == []
    searches = [one for one in sent if "json_each" in one]
    assert len(searches) == 600 // run_lists.PIECE + 1
