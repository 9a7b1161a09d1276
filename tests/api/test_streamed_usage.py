"""A tenant's whole usage is streamed: however many lines it has, a few pages of them are in memory."""

import tracemalloc
from datetime import timedelta

import pytest
from sqlalchemy import insert

from api.route_building import build_routes
from store.tables import UsageHour
from tenants.usage_hours import SUMS
from tests.api.conftest import BASE, Tenant, as_administrator

DAYS, MORE = 1, 3
LINES_A_DAY = 6_000
"""More than a page."""


async def use(tenant: Tenant, first: int, days: int) -> None:
    """Record an hour of usage on each of the days, each line of a session of its own."""
    hour = tenant.service.clock().replace(minute=0, second=0, microsecond=0) - timedelta(days=40)
    named = {"tenant_id": tenant.id, "key_id": 1, "base_model": BASE, "kind": "forward", "run_id": ""}
    for day in range(first, first + days):
        rows = [
            {"session_id": f"{number:032x}", "hour": hour + timedelta(days=day), **named, **dict.fromkeys(SUMS, 1)}
            for number in range(LINES_A_DAY)
        ]
        async with tenant.service.database.write() as transaction:
            await transaction.execute(insert(UsageHour), rows)


async def streamed(tenant: Tenant, path: str) -> tuple[int, int]:
    """Return the number of lines of an answer, and the most bytes that Python's objects had while it came."""
    lines = 0
    tracemalloc.start()
    try:
        async with tenant.http.stream("GET", f"{tenant.service.url}/api/weft/v1/{path}") as answer:
            assert answer.status_code == 200
            async for chunk in answer.aiter_bytes():
                lines += chunk.count(b"\n")
        return lines, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", ["usage?group_by=session&format=csv", "usage/export?format=focus"])
async def test_three_times_as_many_lines_take_no_more_memory(cats: Tenant, dogs: Tenant, path: str) -> None:
    build_routes(cats.service.app.router)
    for tenant in (cats, dogs):
        await as_administrator(tenant)
    path += f"&since={(cats.service.clock() - timedelta(days=60)).isoformat().replace('+00:00', 'Z')}"
    await use(dogs, 0, 1)
    await use(cats, 0, DAYS)
    few, before = await streamed(cats, path)
    await use(cats, DAYS, MORE - DAYS)
    many, after = await streamed(cats, path)
    assert few - 1 >= DAYS * LINES_A_DAY
    assert (many - 1) / (few - 1) == MORE / DAYS
    assert after < 1.1 * before, "with all lines in memory it is 1.2 times as much"
    assert (await streamed(dogs, path))[0] - 1 == (few - 1) / DAYS
