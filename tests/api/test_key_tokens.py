"""A token makes nothing that outlives it, and no client names the service's own sessions."""

import pytest
from sqlalchemy import update

from store.tables import ApiKey
from tenants.rights import Role


async def test_a_token_makes_and_rotates_no_keys(cats) -> None:
    async with cats.service.database.write() as transaction:
        await transaction.execute(update(ApiKey).values(role=Role.ADMIN))
    token = (await cats.http.post("/auth/token")).json()["jwt"]
    (key,) = (await cats.http.get(f"{cats.service.url}/api/weft/v1/keys")).json()["keys"]
    for path in ("keys", f"keys/{key['key_id']}/rotate"):
        url = f"{cats.service.url}/api/weft/v1/{path}"
        refused = await cats.http.post(url, json={}, headers={"X-API-Key": token})
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        assert (await cats.http.post(url, json={})).status_code == 201


@pytest.mark.parametrize("name", ["standing/openai", "import/1"])
async def test_a_client_opens_none_of_the_services_own_sessions(cats, name: str) -> None:
    refused = await cats.http.post("/create_session", json={}, headers={"X-Idempotency-Key": name})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
    assert (await cats.http.post("/create_session", json={}, headers={"X-Idempotency-Key": "mine"})).status_code == 200


async def test_a_search_of_thousands_of_metadata_is_refused(cats) -> None:
    body = {"user_metadata": {f"k{number}": "v" for number in range(1200)}}
    assert (await cats.http.post("/sessions/search", json=body)).status_code == 400
