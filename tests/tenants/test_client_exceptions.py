"""Exceptions of scripts: bounded, idempotent, their tenant's alone, and gone with their session."""

import json
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select, update

from contracts.client_exceptions import MOST_OF_SESSION, told_exceptions
from store.tables import ClientException, Session
from tenants import client_exceptions
from tenants.rights import KeyRights, Principal
from tenants.run_retention import forget_sessions
from tests.tenants.usage_books import NOON, Books

KEY = "tml-0123456789ab-" + "s" * 43


def event(name: str, **fields: Any) -> dict[str, Any]:
    """Return an event as the SDK sends it."""
    told = {"event": "UNHANDLED_EXCEPTION", "event_id": name, "error_type": "KeyError", "error_message": "'x'"}
    return {**told, "event_session_index": 1, "severity": "ERROR", "timestamp": "2026-01-01T00:00:00Z", **fields}


async def tell(books: Books, who: int, *events: dict[str, Any], session: str | None = None) -> int:
    """Record a body of telemetry as tenant ``who``; return how many exceptions are new."""
    body = {"events": [{"event": "SESSION_START"}, *events], "session_id": session or books.sessions[who]}
    told = told_exceptions(json.dumps(body).encode())
    assert told is not None
    async with books.database.write() as transaction:
        return await client_exceptions.record_exceptions(
            transaction, Principal(books.tenants[who], 1, KeyRights(), ""), told, NOON
        )


async def kept(books: Books, who: int) -> list[ClientException]:
    """Return the tenant's exceptions, newest first."""
    async with books.database.read() as session:
        found = await client_exceptions.list_exceptions(
            session, books.tenants[who], session_id=None, after=None, most=5000
        )
    return list(found)


async def test_a_repeat_changes_nothing_and_no_other_tenant_has_it(books: Books) -> None:
    assert await tell(books, 0, event("one"), event("two")) == 2
    assert await tell(books, 0, event("one"), event("two", error_message="other")) == 0
    assert await tell(books, 1, event("three"), session=books.sessions[0]) == 0
    assert [(one.event_id, one.message) for one in await kept(books, 0)] == [("two", "'x'"), ("one", "'x'")]
    assert await kept(books, 1) == []


async def test_a_flood_leaves_the_last_of_a_session_and_of_a_tenant(books: Books, monkeypatch) -> None:
    await tell(books, 1, event("theirs"))
    assert await tell(books, 0, *(event(f"a{number}") for number in range(100))) == MOST_OF_SESSION
    await tell(books, 0, *(event(f"b{number}") for number in range(5)))
    names = [one.event_id for one in await kept(books, 0)]
    assert (len(names), names[0], names[-1]) == (MOST_OF_SESSION, "b4", "a85")
    monkeypatch.setattr(client_exceptions, "MOST_OF_TENANT", 7)
    await tell(books, 0, event("last"))
    assert [one.event_id for one in await kept(books, 0)][:2] == ["last", "b4"]
    assert (len(await kept(books, 0)), len(await kept(books, 1))) == (7, 1)


async def test_texts_are_cut_visibly_escaped_and_without_secrets(books: Books) -> None:
    long = {"error_type": "T" * 500, "error_message": "m" * 9000, "traceback": "begin" + "t" * 40_000 + "KeyError"}
    odd = {"error_type": "a\0b", "error_message": f"key {KEY}", "traceback": "\ud800 eyJa.eyJb.c"}
    await tell(books, 0, event("long", **long), event("odd", **odd), event("bare", traceback=None))
    bare, strange, cut = await kept(books, 0)
    assert bare.traceback == ""
    assert (len(cut.error_type) <= 200, len(cut.message) <= 2048, len(cut.traceback) <= 16384) == (True,) * 3
    assert all("characters cut" in text for text in (cut.error_type, cut.message, cut.traceback))
    assert cut.traceback.endswith("tKeyError")
    assert (strange.error_type, strange.message) == ("a\\x00b", "key tml-0123456789ab-…")
    assert strange.traceback == "\\ud800 eyJ…"


def test_other_bodies_tell_nothing() -> None:
    for body in (
        b"",
        b"[]",
        b"{}",
        b'{"events": 1, "session_id": "x"}',
        b'{"events": [1], "session_id": "x"}',
        b"\xff",
    ):
        assert told_exceptions(body) is None
    assert told_exceptions(b"[" * 100_000) is None


async def test_they_go_with_their_session(books: Books) -> None:
    await tell(books, 0, event("one"))
    await tell(books, 1, event("two"))
    async with books.database.write() as transaction:
        ended = update(Session).where(Session.id == books.sessions[0]).values(ended_at=NOON)
        await transaction.execute(ended)
        await forget_sessions(transaction, before=NOON + timedelta(days=1), after=None, most=100)
    async with books.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(Session)) == 1
    assert (await kept(books, 0), len(await kept(books, 1))) == ([], 1)
