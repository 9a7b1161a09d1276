"""A tenant's whole usage is streamed: however many lines it has, a few pages of them are in memory."""

import tracemalloc
from datetime import timedelta

import pytest
from sqlalchemy import insert

from api.route_building import build_routes
from store.tables import UsageHour
from tenants.metered_operations import SUMS
from tenants.usage_costs import priced_pages
from tests.api.conftest import BASE, Tenant, as_administrator

LINES_A_DAY = 1_200
PAGE = 1_000
"""Lines of usage that are read at once here: fewer than a day's, in place of thousands."""
EVENT = b'"event_info"'
"""Begins an event of the SDK's form."""


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
    """Return the number of lines or events of an answer, and the most bytes that Python's objects had while it came."""
    lines, cut = 0, b""
    tracemalloc.start()
    try:
        async with tenant.http.stream("GET", f"{tenant.service.url}/api/{path}") as answer:
            assert answer.status_code == 200
            async for chunk in answer.aiter_bytes():
                piece = cut + chunk
                lines += chunk.count(b"\n") + piece.count(EVENT)
                cut = piece[1 - len(EVENT) :]
        return lines, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("path", "days", "more"),
    [
        ("weft/v1/usage?group_by=session&format=csv", 1, 4),
        ("weft/v1/usage/export?format=focus", 1, 4),
        # An hour is kept until it is whole, beside the page in which the next one begins.
        ("v1/billing/usage/events?", 2, 8),
    ],
)
async def test_several_times_as_many_lines_take_no_more_memory(
    cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch, path: str, days: int, more: int
) -> None:
    for size in ("tenants.usage_exports._PAGE", "api.tinker.billing._LINES_AT_ONCE"):
        monkeypatch.setattr(size, PAGE)
    monkeypatch.setitem(priced_pages.__kwdefaults__, "most", PAGE)
    build_routes(cats.service.app.router)
    for tenant in (cats, dogs):
        await as_administrator(tenant)
    begin = cats.service.clock().replace(minute=0, second=0, microsecond=0) - timedelta(days=45)
    window = {"since": begin, "starting_on": begin, "ending_before": begin + timedelta(days=14)}
    path += "".join(f"&{name}={time.isoformat().replace('+00:00', 'Z')}" for name, time in window.items())
    headers = path.count("usage?") + path.count("export")
    await use(dogs, 0, 1)
    await use(cats, 0, days)
    few, before = await streamed(cats, path)
    await use(cats, days, more - days)
    many, after = await streamed(cats, path)
    assert few - headers >= days * LINES_A_DAY
    assert (many - headers) / (few - headers) == more / days
    assert after < 1.1 * before, "with all lines in memory it is 1.2 times as much"
    assert (await streamed(dogs, path))[0] - headers == (few - headers) / days
