"""Bodies that are held back: a caller whose key, session or tenant ends meanwhile changes nothing any more."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import pytest
from sqlalchemy import func, select
from starlette.requests import Request

from api.wire import body, late_body
from contracts.errors import Suspended, Unauthenticated
from store.tables import ApiKey, Operation, WebSession
from store.tables import Session as SessionRow
from tenants.key_holds import hold_keys
from tenants.keys import NewKey, revoke_key
from tenants.operator_keys import revoke_operator_key
from tenants.rights import KeyRights, Principal, Role, SuspendMode
from tenants.suspensions import suspend_tenant
from tests.api.admin.conftest import Admin, admin
from tests.api.conftest import Service, Tenant
from tests.api.dashboard.visits import SAME, key_of, visitor

__all__ = ["admin"]
JSON = "application/json"


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The event that a body is being read; every body counts as late."""
    monkeypatch.setattr(late_body, "MOMENT_SECONDS", 0)
    begun, pieces = asyncio.Event(), body.body_pieces

    def watched(request: Request, **bounds: Any) -> Any:
        begun.set()
        return pieces(request, **bounds)

    monkeypatch.setattr(body, "body_pieces", watched)
    return begun


@asynccontextmanager
async def held_back(
    url: str, begun: asyncio.Event, path: str, headers: dict[str, str], content: bytes
) -> AsyncIterator[Callable[[], Awaitable[tuple[int, bytes]]]]:
    """Send a request but for its body's last byte; yields what sends that and returns the answer's status and all of it."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = {"Host": f"{host}:{port}", "Content-Length": str(len(content)), "Connection": "close", **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    writer.write(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + content[:-1])
    async with asyncio.timeout(20):
        await begun.wait()

    async def finish() -> tuple[int, bytes]:
        writer.write(content[-1:])
        async with asyncio.timeout(20):
            said = await reader.read()
        return int(said.split(b" ", 2)[1]), said

    yield finish
    writer.close()


async def revoked(service: Service, key: NewKey) -> None:
    async with service.database.write() as transaction:
        await revoke_key(transaction, prefix=key.prefix, clock=service.clock)


async def suspended(service: Service, name: str, mode: SuspendMode) -> None:
    async with service.database.write() as transaction:
        await suspend_tenant(transaction, name=name, reason="stolen", now=service.clock(), mode=mode)


async def count(service: Service, table: Any, tenant: Tenant) -> int:
    async with service.database.read() as session:
        query = select(func.count()).select_from(table).where(table.tenant_id == tenant.id)
        return await session.scalar(query) or 0


@pytest.mark.parametrize("end", ["nothing", "revoked", "expired", "blocked", "read-only", "another"])
async def test_a_key_that_ends_while_its_body_is_held_back_makes_no_key(
    service: Service, cats: Tenant, dogs: Tenant, begun: asyncio.Event, end: str
) -> None:
    ends = {"expires_at": service.clock().replace(hour=1)} if end == "expired" else {}
    key = await key_of(service, cats, **ends)
    theirs = await key_of(service, dogs)
    headers = {"X-API-Key": key.secret, "Content-Type": JSON}
    content = json.dumps({"role": "admin"}).encode()
    before = await count(service, ApiKey, cats)
    async with held_back(service.url, begun, "/api/weft/v1/keys", headers, content) as finish:
        match end:
            case "revoked":
                await revoked(service, key)
            case "expired":
                service.clock.move(hours=2)
            case "blocked":
                await suspended(service, "cats", SuspendMode.BLOCKED)
            case "read-only":
                await suspended(service, "cats", SuspendMode.READ_ONLY)
            case "another":
                await revoked(service, theirs)
        status, _ = await finish()
    goes_on = end in ("nothing", "another")
    assert status == (201 if goes_on else 401 if end in ("revoked", "expired") else 403)
    assert await count(service, ApiKey, cats) == before + goes_on


async def test_a_key_that_ends_while_its_body_is_held_back_rotates_no_other(
    service: Service, cats: Tenant, begun: asyncio.Event
) -> None:
    key, other = await key_of(service, cats), await key_of(service, cats)
    headers = {"X-API-Key": key.secret, "Content-Type": JSON}
    path = f"/api/weft/v1/keys/{other.id}/rotate"
    async with held_back(service.url, begun, path, headers, b'{"grace_seconds": 0}') as finish:
        await revoked(service, key)
        assert (await finish())[0] == 401
    async with service.database.read() as session:
        assert (await session.get_one(ApiKey, other.id)).expires_at is None


@pytest.mark.parametrize("mode", [SuspendMode.BLOCKED, SuspendMode.READ_ONLY])
async def test_a_tenant_that_is_stopped_while_a_training_body_is_held_back_begins_nothing(
    service: Service, cats: Tenant, begun: asyncio.Event, mode: SuspendMode
) -> None:
    """One that has become read-only is told so by its repeat, as the operation would not fail for it."""
    run = await cats.run()
    headers = {"X-API-Key": cats.key, "Content-Type": JSON}
    content = json.dumps({"model_id": run, "seq_id": 1, "adam_params": {}}).encode()
    async with held_back(service.url, begun, "/api/v1/optim_step", headers, content) as finish:
        await suspended(service, "cats", mode)
        assert (await finish())[0] == (403 if mode is SuspendMode.BLOCKED else 503)
    assert await count(service, Operation, cats) == 0


async def test_a_body_over_its_limit_of_a_key_that_ends_meanwhile_is_not_recorded(
    service: Service, cats: Tenant, begun: asyncio.Event
) -> None:
    run, key = await cats.run(), await key_of(service, cats)
    content = json.dumps({"model_id": run, "seq_id": 1, "filling": "x" * 100_000}).encode()
    headers = {"X-API-Key": key.secret, "Content-Type": JSON}
    async with held_back(service.url, begun, "/api/v1/optim_step", headers, content[:1000]) as finish:
        await revoked(service, key)
        assert (await finish())[0] == 401
    assert await count(service, Operation, cats) == 0


async def test_a_web_session_that_ends_while_its_form_is_held_back_makes_no_key(
    service: Service, cats: Tenant, dogs: Tenant, begun: asyncio.Event
) -> None:
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as page, visitor(service, (await key_of(service, dogs)).secret):
        cookie = page.headers["cookie"]
    begun.clear()
    before = await count(service, ApiKey, cats)
    headers = {**SAME, "Origin": service.url, "Cookie": cookie, "Content-Type": "application/x-www-form-urlencoded"}
    content = urlencode({"note": "x", "role": "admin"}).encode()
    async with held_back(service.url, begun, "/ui/keys", headers, content) as finish:
        async with service.database.write() as transaction:
            for row in await transaction.scalars(select(WebSession).where(WebSession.tenant_id == cats.id)):
                await transaction.delete(row)
        status, said = await finish()
    assert (status, b"/ui/login" in said) == (303, True)
    assert await count(service, ApiKey, cats) == before
    assert await count(service, WebSession, dogs) == 1


async def test_an_operators_key_that_ends_while_its_body_is_held_back_makes_no_key(
    service: Service, cats: Tenant, admin: Admin, begun: asyncio.Event
) -> None:
    before = await count(service, ApiKey, cats)
    headers = {"X-API-Key": admin.key.secret, "Content-Type": JSON}
    path = f"/admin/v1/tenants/{cats.id}/keys"
    async with held_back(admin.url, begun, path, headers, b'{"role": "admin"}') as finish:
        async with service.database.write() as transaction:
            await revoke_operator_key(transaction, key=admin.key.prefix, clock=service.clock)
        assert (await finish())[0] == 401
    assert await count(service, ApiKey, cats) == before


async def test_a_usual_body_costs_no_second_check(
    service: Service, cats: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    asked, authenticate = [], service.services.batched_reads.keys.authenticate

    async def counted(secret: str | None, address: str | None = None) -> Principal:
        asked.append(secret)
        return await authenticate(secret, address)

    monkeypatch.setattr(service.services.batched_reads.keys, "authenticate", counted)
    made = await cats.http.post("/create_session", json={"tags": [], "sdk_version": "0.38.0"})
    assert (made.status_code, len(asked)) == (200, 1)
    assert await count(service, SessionRow, cats) == 1


async def test_a_caller_that_ended_before_its_transaction_holds_no_key(service: Service, cats: Tenant) -> None:
    """The last look is in the transaction itself: a key may end after its body has come."""
    key, other = await key_of(service, cats), await key_of(service, cats)
    caller = Principal(cats.id, key.id, KeyRights(Role.ADMIN), key.prefix)
    beside = Principal(cats.id, other.id, KeyRights(Role.ADMIN), other.prefix)
    await revoked(service, key)
    async with service.database.write() as transaction:
        with pytest.raises(Unauthenticated):
            await hold_keys(transaction, caller, service.clock(), other.id)
        _, rows = await hold_keys(transaction, beside, service.clock(), key.id)
        assert rows.keys() == {key.id, other.id}
    await suspended(service, "cats", SuspendMode.BLOCKED)
    async with service.database.write() as transaction:
        with pytest.raises(Suspended):
            await hold_keys(transaction, beside, service.clock())
