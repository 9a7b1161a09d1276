"""Keys of callers: every endpoint wants a live key, and a key's secret is nowhere but with its owner."""

import hashlib

import httpx
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from sqlalchemy import select
from tinker.cli.auth_api import SelfApiKeyResponse

from store.tables import ApiKey
from tenants.keys import create_key, revoke_key


def _endpoints(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path that the application serves below /api/v1."""

    contexts = [(context.path or "", context.methods or set()) for context in iter_route_contexts(app.routes)]
    return [(method, path) for path, methods in contexts for method in methods if path.startswith("/api/v1/")]


async def test_every_endpoint_refuses_strangers_before_it_reads_them(service, cats) -> None:
    # Links to files carry a secret of their own.
    open_ones = ("/api/v1/healthz", "/api/v1/downloads/")
    endpoints = [one for one in _endpoints(service.app) if not one[1].startswith(open_ones)]
    assert len(endpoints) > 30
    async with service.database.write() as transaction:
        revoked = await create_key(transaction, tenant=cats.id, note="", clock=service.clock)
        await revoke_key(transaction, prefix=revoked.prefix, clock=service.clock)
    wrong = [None, "", "tml-wrong", "sk-other", cats.key[:-1], cats.key + "x", cats.key.upper(), revoked.secret]
    async with httpx.AsyncClient(base_url=service.url, timeout=40) as http:
        for method, path in endpoints:
            for key in wrong if "config" in path else (None, "tml-wrong"):
                headers = {} if key is None else {"X-API-Key": key}
                response = await http.request(method, path, headers=headers, content=b"{not json")
                assert (response.status_code, response.json()["code"]) == (401, "unauthenticated"), (method, path, key)


async def test_health_needs_no_key(service) -> None:
    async with httpx.AsyncClient(base_url=service.url, timeout=40) as http:
        for path in ("/healthz", "/api/v1/healthz"):
            assert (await http.get(path)).json() == {"status": "ok"}


async def test_revoked_key_is_refused_at_once_and_others_go_on(cats, service) -> None:
    async with service.database.write() as transaction:
        second = await create_key(transaction, tenant=cats.id, note="", clock=service.clock)
    assert (await cats.http.post("/client/config", json={})).status_code == 200
    async with service.database.write() as transaction:
        await revoke_key(transaction, prefix=cats.key, clock=service.clock)
    assert (await cats.http.post("/client/config", json={})).status_code == 401
    other = await cats.http.post("/client/config", json={}, headers={"X-API-Key": second.secret})
    assert other.status_code == 200


async def test_secret_is_stored_hashed_and_nowhere_else(cats, service, settings) -> None:
    async with service.database.read() as session:
        (row,) = await session.scalars(select(ApiKey).where(ApiKey.tenant_id == cats.id))
    assert row.secret_hash == hashlib.sha256(cats.key.encode()).digest()
    secret_part = cats.key.removeprefix(row.prefix)
    assert len(secret_part) > 40
    for file in settings.data_dir.glob("weft.db*"):
        assert secret_part.encode() not in file.read_bytes()


async def test_key_describes_itself(cats, dogs) -> None:
    info = SelfApiKeyResponse.model_validate((await cats.http.get("/auth/apikey/me")).json())
    assert cats.key.startswith(info.name)
    assert len(info.name) < 20
    assert (info.note, info.details.org_details.name) == ("key of cats", "cats")
    assert (await dogs.http.get("/auth/apikey/me")).json()["key_id"] != info.key_id


async def test_a_bearer_key_describes_and_revokes_itself(cats, service) -> None:
    headers = {"Authorization": f"Bearer {cats.key}"}
    async with httpx.AsyncClient(base_url=f"{service.url}/api/v1", headers=headers, timeout=40) as http:
        assert (await http.get("/auth/apikey/me")).json()["note"] == "key of cats"
        assert (await http.delete("/auth/apikey/me")).status_code == 204
        assert (await http.get("/auth/apikey/me")).status_code == 401


async def test_key_revokes_only_itself(cats, dogs) -> None:
    assert (await cats.http.delete("/auth/apikey/me")).status_code == 204
    assert (await cats.http.get("/auth/apikey/me")).status_code == 401
    assert (await dogs.http.get("/auth/apikey/me")).status_code == 200
