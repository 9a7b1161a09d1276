"""Served against entitled: each tenant's part of the tokens of two windows, against its weight among those with work."""

from datetime import timedelta

import pytest
from sqlalchemy import update

from store.clock import utc_now
from store.tables import Operation
from tests.api.admin.conftest import Admin
from tests.api.conftest import Tenant


async def end(admin: Admin, operation: str, *, tokens: int, minutes_ago: float) -> None:
    """Have the operation be one that has ended, so many minutes ago."""
    ended = utc_now() - timedelta(minutes=minutes_ago)
    async with admin.service.database.write() as transaction:
        done = update(Operation).where(Operation.id == operation)
        await transaction.execute(done.values(state="done", finished_at=ended, tokens=tokens))


async def test_each_tenant_is_told_what_it_got_against_its_share_over_two_windows(
    admin: Admin, cats: Tenant, dogs: Tenant, new_tenant
) -> None:
    idle = await new_tenant("idle")
    flood, light = await cats.run(), await dogs.run()
    await end(admin, await cats.operation(flood, 1), tokens=600, minutes_ago=2)
    await end(admin, await cats.operation(flood, 2), tokens=600, minutes_ago=30)
    await end(admin, await dogs.operation(light, 1), tokens=200, minutes_ago=3)
    await dogs.operation(light, 2)
    await admin.http.patch(f"/tenants/{cats.id}", json={"share": 3}, headers={"If-Match": "*"})
    await cats.checkpoint(flood, "kept")
    listed = (await admin.http.get("/shares")).raise_for_status().json()["items"]
    of = {one["name"]: one for one in listed}
    assert [window["seconds"] for window in of["cats"]["served"]] == [300, 3600]
    assert [window["tokens"] for window in of["cats"]["served"]] == [600, 1200]
    assert [window["served_share"] for window in of["cats"]["served"]] == pytest.approx([0.75, 1200 / 1400])
    assert [window["entitled_share"] for window in of["cats"]["served"]] == pytest.approx([0.75, 0.75])
    assert [window["served_share"] for window in of["dogs"]["served"]] == pytest.approx([0.25, 200 / 1400])
    assert (of["dogs"]["pending"], of["cats"]["pending"]) == (1, 0)
    assert (of["cats"]["stored_bytes"], of["cats"]["checkpoints"]) == (7, 1)
    # The half hour may have begun yesterday.
    assert of["cats"]["tokens_today"] in (0, 600, 1200)
    assert [window["entitled_share"] for window in of["idle"]["served"]] == [0.0, 0.0]
    assert idle.id in {one["id"] for one in listed}


async def test_a_suspended_tenant_is_entitled_to_nothing_and_the_others_to_all(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    for tenant in (cats, dogs):
        await tenant.operation(await tenant.run())
    (await admin.http.put(f"/tenants/{cats.id}/suspension", json={"reason": "unpaid"})).raise_for_status()
    listed = (await admin.http.get("/shares")).raise_for_status().json()["items"]
    entitled = {one["name"]: [window["entitled_share"] for window in one["served"]] for one in listed}
    assert entitled == {"cats": [0.0, 0.0], "dogs": [1.0, 1.0]}


async def test_shares_come_in_pages(admin: Admin, new_tenant) -> None:
    names = [f"tenant-{number}" for number in range(5)]
    for name in names:
        await new_tenant(name)
    found, after = [], None
    for _ in range(4):
        asked = {"limit": 2} | ({} if after is None else {"after": after})
        page = (await admin.http.get("/shares", params=asked)).raise_for_status().json()
        found += [one["name"] for one in page["items"]]
        after = page["next"]
        if after is None:
            break
    assert sorted(found) == names
