"""A tenant's many writes wait for each other; another tenant's write is next but one."""

import asyncio

from tests.api.conftest import Service, Tenant

FLOOD = 40


async def test_a_heartbeat_does_not_wait_behind_another_tenants_flood_of_writes(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    flooding, theirs = await cats.session(), await dogs.session()
    places, ended = service.database.places, list[str]()

    async def beat(tenant: Tenant, session: str, name: str) -> None:
        answer = await tenant.http.post("/session_heartbeat", json={"session_id": session})
        assert answer.status_code == 200
        ended.append(name)

    async def until_waiting(count: int) -> None:
        while places.waiting < count:
            assert (await dogs.http.get(f"{service.url}/healthz")).status_code == 200

    async with asyncio.timeout(60):
        async with service.database.write():
            flood = [asyncio.create_task(beat(cats, flooding, "cats")) for _ in range(FLOOD)]
            await until_waiting(FLOOD)
            beating = asyncio.create_task(beat(dogs, theirs, "dogs"))
            await until_waiting(FLOOD + 1)
        await asyncio.gather(*flood, beating)
    assert ended.index("dogs") < FLOOD / 2
