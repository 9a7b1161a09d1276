"""Refused logins: a wrong key and an unknown one cost the same work, and whatever is wrong is answered alike to the byte.

Work is counted, not timed: statements, hashes, comparisons, and tries that the guard notes.
"""

import hmac
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import event

from api.dashboard.login_guard import LoginGuard
from tenants import key_reader, operator_keys
from tenants.key_text import hash_of, key_text, new_prefix, new_secret
from tenants.keys import revoke_key
from tenants.login_codes import make_code
from tenants.operator_keys import create_operator_key, revoke_operator_key
from tests.api.admin.conftest import admin  # noqa: F401 - a fixture
from tests.api.dashboard.visits import SAME, key_of, log_in, visitor

MALFORMED = (
    "",
    "nonsense",
    "tml-",
    "tml-0",
    "Bearer tml-",
    "tml-000000000000-short",
    "\N{CAT}" * 20,
    "tml-\N{CAT}\u202e" + "x" * 60,
    "tml-" + "0" * 5000,
    "<script>alert(1)</script>",
    "eyJhbGciOiJIUzI1NiJ9.e30.x",
)
_APART = ("date", "x-trace-id")


@pytest.fixture
def work(service, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps that logins take, in order, as they are taken."""
    steps: list[str] = []

    def counted(name: str, done: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **named: Any) -> Any:
            steps.append(name)
            return done(*given, **named)

        return step

    for module in (key_reader, operator_keys):
        compared = counted("compared", hmac.compare_digest)
        monkeypatch.setattr(module, "hmac", SimpleNamespace(compare_digest=compared))
        monkeypatch.setattr(module, "hash_of", counted("hashed", hash_of))
    noted = LoginGuard.note

    def note(self: LoginGuard, *names: str, **named: Any) -> None:
        steps.append(f"noted {len(names)}")
        noted(self, *names, **named)

    monkeypatch.setattr(LoginGuard, "note", note)
    return steps


@contextmanager
def _statements(service, steps: list[str]) -> Iterator[None]:
    """Add the texts of statements to the steps."""
    engine = service.database.engine.sync_engine

    def sent(*call: Any) -> None:
        steps.append(str(call[2]))

    event.listen(engine, "before_cursor_execute", sent)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", sent)


def _told(answer: httpx.Response) -> tuple[int, bytes, list[tuple[str, str]]]:
    """Return all that an answer tells its reader, but for the time of day and the name of the request."""
    return answer.status_code, answer.content, [one for one in answer.headers.items() if one[0] not in _APART]


Ask = Callable[[str], Awaitable[httpx.Response]]


async def _path(service, steps: list[str], ask: Ask, key: str) -> tuple[list[str], Any]:
    """Return the steps that a refused login takes, and what it is told. The minute of the guard is over before it."""
    service.clock.move(minutes=2)
    steps.clear()
    with _statements(service, steps):
        answer = await ask(key)
    assert answer.status_code == 401
    return list(steps), _told(answer)


def _another_secret(prefix: str) -> str:
    """Return a key of that first part with a secret of its own and its right checksum."""
    return key_text(prefix, new_secret())


async def test_a_wrong_key_and_an_unknown_one_take_the_same_path(service, cats, dogs, work: list[str]) -> None:
    key, ended = await key_of(service, cats), await key_of(service, cats)
    async with service.database.write() as transaction:
        await revoke_key(transaction, prefix=ended.prefix, clock=service.clock)
    async with visitor(service) as http, visitor(service, dogs.key) as other:

        async def ask(secret: str) -> httpx.Response:
            return await log_in(http, secret)

        unknown = await _path(service, work, ask, _another_secret(new_prefix()))
        assert [one for one in unknown[0] if len(one) < 20] == ["hashed", "compared", "noted 2"]
        assert len(unknown[0]) == 4, "one statement besides"
        for wrong in (_another_secret(key.prefix), _another_secret(ended.prefix), ended.secret):
            assert await _path(service, work, ask, wrong) == unknown
        assert (await log_in(http, key.secret)).status_code == 303
        assert (await other.get("/ui")).status_code == 200


async def test_a_wrong_operators_key_and_an_unknown_one_take_the_same_path(
    admin,  # noqa: F811
    work: list[str],
) -> None:
    service = admin.service
    async with service.database.write() as transaction:
        ended = await create_operator_key(transaction, note="ended", expires_at=None, clock=service.clock)
        await revoke_operator_key(transaction, key=ended.prefix, clock=service.clock)
    async with httpx.AsyncClient(base_url=admin.url, timeout=40, headers=SAME) as http:

        async def ask(secret: str) -> httpx.Response:
            return await http.post("/ops/login", data={"key": secret})

        unknown = await _path(service, work, ask, _another_secret(new_prefix()))
        assert [one for one in unknown[0] if len(one) < 20] == ["hashed", "compared", "noted 1"]
        for wrong in (_another_secret(admin.key.prefix), _another_secret(ended.prefix), ended.secret):
            assert await _path(service, work, ask, wrong) == unknown
        assert (await ask(admin.key.secret)).status_code == 303


async def test_a_malformed_key_is_refused_alike_to_the_byte(service, cats, dogs, admin) -> None:  # noqa: F811
    """Malformed keys, mistyped ones, another door's, and an operator's or a tenant's at the other's listener."""
    mistyped = cats.key[:-1] + ("0" if cats.key[-1] != "0" else "1")
    async with (
        visitor(service) as http,
        httpx.AsyncClient(base_url=admin.url, timeout=40, headers=SAME) as operators,
        visitor(service, dogs.key) as other,
    ):
        doors = ((http, "/ui/login", admin.key.secret), (operators, "/ops/login", cats.key))
        for browser, path, others in doors:
            expected = _told(await browser.post(path, data={"key": _another_secret(new_prefix())}))
            for wrong in (*MALFORMED, mistyped, others):
                service.clock.move(minutes=2)
                answer = await browser.post(path, data={"key": wrong})
                assert _told(answer) == expected, wrong[:40]
            service.clock.move(minutes=2)
            assert _told(await browser.post(path, data={"other": "x"})) == expected
        assert (await other.get("/ui")).status_code == 200


async def test_a_code_is_refused_alike_whether_it_is_used_late_or_made_up(service, cats) -> None:
    key, ended = await key_of(service, cats), await key_of(service, cats)
    async with visitor(service) as http:

        async def refused(code: str) -> Any:
            answer = await http.post("/ui/login/code", data={"code": code})
            assert "set-cookie" not in answer.headers
            return _told(answer)

        async with service.database.write() as transaction:
            used = await make_code(transaction, key.id, now=service.clock())
            late = await make_code(transaction, key.id, now=service.clock())
            orphan = await make_code(transaction, ended.id, now=service.clock())
            await revoke_key(transaction, prefix=ended.prefix, clock=service.clock)
        assert (await http.post("/ui/login/code", data={"code": used})).status_code == 303
        answers = [await refused(used), await refused(orphan)]
        service.clock.move(minutes=2)
        answers += [await refused(one) for one in (late, "made up", "", "\N{CAT}" * 500)]
        assert {status for status, *_ in answers} == {401}
        assert all(one == answers[0] for one in answers)
