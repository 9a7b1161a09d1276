"""Client tokens: SDKs that exchange their key get one, it stands for the key as long as that lives, and for no other."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from tinker.lib._jwt_auth import jwt_claims

from store.data_folder import DataFolder
from tenants.keys import revoke_key
from tenants.signed_tokens import TokenSigner
from tests.api.conftest import Service, Tenant


async def token_of(tenant: Tenant) -> str:
    """A token for the tenant's key."""
    answer = await tenant.http.post("/auth/token", json={})
    return str(answer.raise_for_status().json()["jwt"])


async def ask(service: Service, token: str, path: str = "/auth/apikey/me", method: str = "GET") -> httpx.Response:
    """A request with the token in place of a key."""
    async with httpx.AsyncClient(base_url=f"{service.url}/api/v1", headers={"X-API-Key": token}, timeout=40) as http:
        return await http.request(method, path, json={} if method == "POST" else None)


@pytest.mark.parametrize(
    ("version", "exchanges"), [("0.38.0", True), ("0.39.1", True), ("0.36.0", False), ("0.18.2", False)]
)
async def test_sdks_that_renew_a_refused_token_are_told_to_exchange_their_key(
    cats: Tenant, version: str, exchanges: bool
) -> None:
    headers = {"X-Stainless-Package-Version": version}
    config = (await cats.http.post("/client/config", json={}, headers=headers)).json()
    assert config["pjwt_auth_enabled"] is exchanges


async def test_a_token_stands_for_its_key_and_says_whose_it_is(service: Service, cats: Tenant, dogs: Tenant) -> None:
    token, other = await token_of(cats), await token_of(dogs)
    claims = jwt_claims(token)
    assert (claims["org_id"], claims["sub"]) == ("cats", f"tml:key:{cats.key[:16]}")
    assert claims["exp"] - claims["iat"] >= 3600
    assert cats.key not in json.dumps(claims)
    for tenant, mine in ((cats, token), (dogs, other)):
        by_token, by_key = await ask(service, mine), await tenant.http.get("/auth/apikey/me")
        assert by_token.json() == by_key.json()


async def test_a_repeated_exchange_gives_the_same_token(cats: Tenant, dogs: Tenant) -> None:
    assert await token_of(cats) == await token_of(cats) != await token_of(dogs)


async def test_a_token_ends_with_its_time(service: Service, cats: Tenant, clock) -> None:
    token = await token_of(cats)
    clock.move(minutes=60)
    assert (await ask(service, token)).status_code == 200
    clock.move(minutes=5)
    refused = await ask(service, token)
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated")
    assert 'error="invalid_token"' in refused.headers["www-authenticate"], "on which the SDK exchanges its key again"


@pytest.mark.parametrize("by", ["operator", "itself"])
async def test_a_token_ends_with_its_key_at_once_and_others_go_on(
    service: Service, cats: Tenant, dogs: Tenant, by: str
) -> None:
    token, other = await token_of(cats), await token_of(dogs)
    if by == "itself":
        assert (await ask(service, token, method="DELETE")).status_code == 204
    else:
        async with service.database.write() as transaction:
            await revoke_key(transaction, prefix=cats.key, clock=service.clock)
    assert (await ask(service, token)).status_code == 401
    assert (await cats.http.get("/auth/apikey/me")).status_code == 401
    assert (await ask(service, other)).status_code == 200


async def test_a_token_makes_no_token(service: Service, cats: Tenant) -> None:
    refused = await ask(service, await token_of(cats), "/auth/token", "POST")
    assert refused.status_code == 401


def _forged(token: str, **changed: object) -> str:
    header, body, signature = token.split(".")
    claims = {**json.loads(base64.urlsafe_b64decode(body + "==")), **changed}
    return f"{header}.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.{signature}"


async def test_a_changed_token_is_none(service: Service, cats: Tenant, dogs: Tenant) -> None:
    token = await token_of(cats)
    header, body, signature = token.split(".")
    nothing = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').decode().rstrip("=")
    signer = TokenSigner(service.services.runtime.data_folder, service.clock)
    wrong = [
        _forged(token, key=dogs.key[:16]),
        _forged(token, exp=2**40),
        f"{nothing}.{body}.",
        f"{nothing}.{body}.{signature}",
        f"{header}.{body}.",
        f"{header}.{body}",
        f"{token}x",
        token[:-1],
        "eyJ",
        "eyJ..",
        "eyJ" + "a" * 20_000,
        signer.sign({"key": cats.key[:16]}, purpose="another", lifetime=timedelta(hours=1)),
    ]
    for one in wrong:
        assert (await ask(service, one)).status_code == 401, one[:100]
    assert (await ask(service, token)).status_code == 200


def test_processes_that_start_together_share_one_secret(tmp_path) -> None:
    def signed(_: int) -> str:
        signer = TokenSigner(DataFolder(tmp_path), lambda: datetime(2030, 1, 1, tzinfo=UTC))
        return signer.sign({"key": "a"}, purpose="test", lifetime=timedelta(hours=1))

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(signed, range(32)))) == 1
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
