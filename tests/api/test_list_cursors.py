"""Lists of weft's own go on behind a row, so that rows that come or go between two pages shift none."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from contracts.paths import Segment
from tests.api.conftest import Service, Tenant

PATHS = ("checkpoints", "adapters")


async def page_of(tenant: Tenant, path: str, **query: object) -> dict[str, Any]:
    """A page of two rows."""
    answer = await tenant.http.get(f"{tenant.service.url}/api/weft/v1/{path}", params={"limit": 2, **query})  # type: ignore[dict-item]
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


async def pages(tenant: Tenant, path: str, between: Callable[[int], Awaitable[object]]) -> list[list[str]]:
    """Names of the rows of all pages; ``between`` is awaited after each."""
    found: list[list[str]] = []
    cursor: str | None = None
    while True:
        page = await page_of(tenant, path, **({} if cursor is None else {"cursor": cursor}))
        found.append([row.get("adapter") or row["checkpoint_id"] for row in page[path]])
        if (cursor := page["next_cursor"]) is None:
            return found
        await between(len(found))


async def test_checkpoints_that_come_or_go_between_two_pages_shift_no_other(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    mine, theirs = await cats.run(), await dogs.run()
    for number in range(5):
        service.clock.move(seconds=1 if number % 2 else 0)
        await cats.checkpoint(mine, f"c{number}", segment=Segment.SAMPLER_WEIGHTS)
        await dogs.checkpoint(theirs, f"c{number}", segment=Segment.SAMPLER_WEIGHTS)
    whole = [row["checkpoint_id"] for row in (await page_of(cats, "checkpoints", limit=10))["checkpoints"]]
    assert len(whole) == 5

    async def change(number: int) -> None:
        # The last row of the page goes, and a new first one comes.
        gone = {"paths": [f"tinker://{mine}/{whole[2 * number - 1]}"]}
        await cats.http.post(f"{service.url}/api/weft/v1/checkpoints/delete", json=gone)
        service.clock.move(seconds=1)
        await cats.checkpoint(mine, f"new{number}", segment=Segment.SAMPLER_WEIGHTS)

    assert await pages(cats, "checkpoints", change) == [whole[:2], whole[2:4], whole[4:]]


async def test_adapters_that_come_between_two_pages_shift_no_other(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    await dogs.run()
    for _ in range(4):
        await cats.run()
    whole = [row["adapter"] for row in (await page_of(cats, "adapters", limit=10))["adapters"]]

    async def change(_: int) -> None:
        service.clock.move(seconds=1)
        await cats.run()

    assert await pages(cats, "adapters", change) == [whole[:2], whole[2:]]


@pytest.mark.parametrize("path", PATHS)
async def test_a_wrong_cursor_is_refused_and_pages_by_offset_go_on_for_older_clients(cats: Tenant, path: str) -> None:
    run = await cats.run()
    for number in range(3):
        await cats.run()
        await cats.checkpoint(run, f"c{number}")
    for wrong in ("x", "1", "-", "1" * 30 + "-x"):
        answer = await cats.http.get(f"{cats.service.url}/api/weft/v1/{path}", params={"cursor": wrong})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    whole = (await page_of(cats, path, limit=10))[path]
    assert (await page_of(cats, path, offset=2))[path] == whole[2:4]
