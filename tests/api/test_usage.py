"""Usage over HTTP: by hour in the SDK's form and in weft's own, with the same totals, and a tenant's own."""

import csv
import io
from datetime import timedelta

import pytest
import pytest_asyncio
from sqlalchemy import insert, update

from ledger.pruning import prune
from store.tables import ApiKey, Operation, StorageHour
from tenants.rights import Role

HOUR = timedelta(hours=1)


@pytest_asyncio.fixture(autouse=True)
async def billing_keys(cats, dogs) -> None:
    """Let the tenants' keys see what was used, which a member's key may not."""
    async with cats.service.database.write() as transaction:
        await transaction.execute(update(ApiKey).values(role=Role.BILLING))


async def test_a_members_key_sees_no_bill(cats) -> None:
    async with cats.service.database.write() as transaction:
        await transaction.execute(update(ApiKey).values(role=Role.MEMBER))
    for path in ("/billing/usage/checkpoints/current", "/billing/usage/events"):
        assert (await cats.http.get(path, params=window(cats))).status_code == 403


async def ended(tenant, lane: str, number: int, **columns: object) -> None:
    """Record an operation that has ended now."""
    now = tenant.service.clock()
    row = {
        "id": f"{tenant.id}-{number}",
        "tenant_id": tenant.id,
        "lane": lane,
        "seq_id": number,
        "kind": "forward_backward",
        "base_model": "test/tiny",
        "state": "done",
        "body_digest": b"",
        "tokens": 10,
        "created_at": now,
        "finished_at": now,
        "key_id": 1,
    }
    async with tenant.service.database.write() as transaction:
        await transaction.execute(insert(Operation), [row | columns])


async def work(tenant) -> str:
    """Have a pass, a sample and a save ended, and an hour of storage; return the session."""
    session = await tenant.session()
    await ended(tenant, f"{session}:train:0", 1)
    sample = {"kind": "sample", "tokens": 11, "sampled_tokens": 5, "cached_tokens": 4}
    await ended(tenant, f"{session}:sample:0", 2, **sample)
    await ended(tenant, f"{session}:train:0", 3, kind="save_weights", tokens=0)
    hour = {
        "tenant_id": tenant.id,
        "hour": tenant.service.clock(),
        "project": tenant.id,
        "nbytes": 2 * 10**9,
        "checkpoints": 1,
    }
    async with tenant.service.database.write() as transaction:
        await transaction.execute(insert(StorageHour), [hour])
    return session


def window(tenant) -> dict[str, str]:
    now = tenant.service.clock()
    return {"starting_on": (now - HOUR).isoformat(), "ending_before": (now + HOUR).isoformat()}


async def test_billing_tells_each_kind_of_usage_apart(cats, dogs) -> None:
    session = await work(cats)
    await work(dogs)
    answer = (await cats.http.get("/billing/usage/events", params=window(cats))).json()
    assert [one["event_info"] for one in answer["data"]] == [
        {"type": "training", "token_count": 10},
        {"type": "sampling_sample", "token_count": 5},
        {"type": "sampling_prefill", "cached": True, "token_count": 4},
        {"type": "sampling_prefill", "cached": False, "token_count": 2},
        {"type": "checkpoint", "count": 1},
        {"type": "storage", "free": False, "gigabyte_hours": 2.0},
    ]
    assert {one["session_id"] for one in answer["data"]} == {session, None}
    assert set(answer["sessions"]) == {session}
    assert answer["data"][0]["user_id"].startswith("tml-")
    assert all(one["estimated_cost_usd"] is None for one in answer["data"])


async def test_what_was_pruned_is_told_as_before(cats) -> None:
    await work(cats)
    before = (await cats.http.get("/billing/usage/events", params=window(cats))).json()
    async with cats.service.database.write() as transaction:
        now = cats.service.clock() + HOUR
        assert await prune(transaction, finished_before=now, now=now) == 3
    assert (await cats.http.get("/billing/usage/events", params=window(cats))).json() == before


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("2026-01-01T00:30:00Z", "2026-01-01T02:00:00Z"),
        ("2026-01-01T00:00:00", "2026-01-01T02:00:00Z"),
        ("2026-01-01T02:00:00Z", "2026-01-01T00:00:00Z"),
        ("2026-01-01T00:00:00Z", "2026-01-16T00:00:00Z"),
        ("0001-01-01T00:00:00+14:00", "9999-12-31T23:00:00-14:00"),
        ("9999-12-31T00:00:00Z", "9999-12-31T23:00:00Z"),
        ("yesterday", "2026-01-16T00:00:00Z"),
    ],
)
async def test_a_window_that_is_no_whole_hours_is_refused(cats, begin: str, end: str) -> None:
    answer = await cats.http.get("/billing/usage/events", params={"starting_on": begin, "ending_before": end})
    assert answer.status_code == 400


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:00:00-14:00", "2026-01-01T00:00:00"])
async def test_a_time_that_no_database_holds_is_refused_wherever_one_is_sent(cats, time: str) -> None:
    async with cats.service.database.write() as transaction:
        await transaction.execute(update(ApiKey).values(role=Role.ADMIN))
    own = f"{cats.service.url}/api/weft/v1"
    answers = [
        await cats.http.get(f"{own}/usage", params={"since": time}),
        await cats.http.get(f"{own}/usage", params={"since": "2026-01-01T00:00:00Z", "before": time}),
        await cats.http.post(f"{own}/keys", json={"expires_at": time}),
        await cats.http.post("/sessions/search", json={"cursor": {"last_session_id": "x", "last_created_at": time}}),
    ]
    assert [answer.status_code for answer in answers] == [400] * 4


async def test_storage_now_is_by_project_and_of_the_tenant(cats, dogs) -> None:
    run = await cats.run()
    for name in ("one", "two"):
        await cats.checkpoint(run, name)
    mine = (await cats.http.get("/billing/usage/checkpoints/current")).json()
    assert [(one["project_id"], one["checkpoint_count"], one["size_bytes"]) for one in mine["data"]] == [
        (cats.id, 2, 14)
    ]
    assert (await dogs.http.get("/billing/usage/checkpoints/current")).json()["data"] == []
    other = await cats.http.get("/billing/usage/checkpoints/current", params={"project_id": "p-none"})
    assert other.json()["data"] == []


async def test_own_usage_has_the_same_totals_for_every_grouping_and_in_csv(cats, dogs) -> None:
    await work(cats)
    await work(dogs)
    url = f"{cats.service.url}/api/weft/v1/usage"
    since = (cats.service.clock() - HOUR).isoformat()
    totals = set()
    for by in ([], ["kind"], ["session", "run"], ["project", "key", "base_model", "kind"]):
        lines = (await cats.http.get(url, params={"since": since, "group_by": by})).json()["lines"]
        totals.add(
            (sum(one["operations"] for one in lines), sum(one["train_tokens"] + one["prompt_tokens"] for one in lines))
        )
    assert totals == {(3, 16)}
    text = (await cats.http.get(url, params={"since": since, "group_by": "kind", "format": "csv"})).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["kind"], row["sampled_tokens"]) for row in rows] == [
        ("forward_backward", "0"),
        ("sample", "5"),
        ("save_weights", "0"),
    ]


async def test_own_usage_comes_in_pages(cats) -> None:
    await work(cats)
    url = f"{cats.service.url}/api/weft/v1/usage"
    query = {"since": (cats.service.clock() - HOUR).isoformat(), "group_by": "kind", "limit": 2}
    first = (await cats.http.get(url, params=query)).json()
    second = (await cats.http.get(url, params=query | {"offset": first["next_offset"]})).json()
    assert [one["kind"] for one in first["lines"] + second["lines"]] == ["forward_backward", "sample", "save_weights"]
    assert second["next_offset"] is None
    assert (await cats.http.get(url, params={"since": "2026-01-01T00:00:00"})).status_code == 400
