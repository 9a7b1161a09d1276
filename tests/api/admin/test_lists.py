"""Lists are told in pages, each row once; a list that is told whole has a bound, and a reason here."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from store.tables import BudgetAlert, UsageDay, UsageHour
from tenants.budget_settings import BudgetName, set_budget
from tenants.budgets import Period
from tenants.limits import Limits
from tenants.prices import PricedQuantity
from tenants.spending import Spender, Spending, spend
from tenants.webhooks import WebhookSpec, send_test, set_webhook
from tests.api.admin.conftest import Admin
from tests.api.conftest import BASE
from tests.api.conftest import Tenant as Client

WHOLE = {
    "/prices": "500 are kept: each look at usage reads them all",
    "/tenants/{tenant_id}/prices": "500 of a tenant",
    "/tenants/{tenant_id}/projects": "1,000 of a tenant, which its own list shows whole as well",
    "/tenants/{tenant_id}/webhooks": "a limit of the tenant",
    "/replicas": "those that live processes tell of, and an operator's directives",
    "/trainers": "processes that work: a dead one's row goes",
    "/pools": "as trainers",
    "/apis": "as trainers",
    "/ended-processes": "the last 50 of an hour",
    "/queue": "base models by kinds of operations",
    "/housekeeping": "the steps that this version has",
}
"""Lists in one page, each with what bounds it (decision 55)."""
SINCE = {"since": "2025-01-01T00:00:00Z"}
QUERIES = {"/audit": {"resource": "base"}, "/tenants/{tenant_id}/usage": SINCE}
"""Filters that leave out what a reading of the list itself adds to it, and those that a list asks for."""
ROWS = 5
"""Rows of each list here: three pages of two."""


def lists(document: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield path and parameters of each GET that answers a list."""
    for path, methods in document["paths"].items():
        answer = (
            methods.get("get", {}).get("responses", {}).get("200", {}).get("content", {}).get("application/json", {})
        )
        if answer.get("schema", {}).get("$ref", "").startswith("#/components/schemas/Listed_"):
            yield path.removeprefix("/admin/v1"), [one["name"] for one in methods["get"].get("parameters", [])]


async def filled(admin: Admin, cats: Client, dogs: Client) -> dict[str, str]:
    """Give every list rows, of two tenants where it has rows of tenants; return the names in its path."""
    service, now = admin.service, admin.service.clock()
    runs = [await cats.run(model_seq_id=number) for number in range(ROWS)]
    for number in range(ROWS):
        (await admin.http.post("/tenants", json={"name": f"tenant-{number}"})).raise_for_status()
        (await admin.http.put(f"/gates/pool/base-{number}", json={})).raise_for_status()
        (await admin.http.put(f"/bases/base-{number}", json={"fingerprint": "0" * 64})).raise_for_status()
        await cats.checkpoint(runs[number], "one")
        await cats.operation(runs[number])
    foreign = await dogs.run()
    await dogs.checkpoint(foreign, "one")
    await dogs.operation(foreign)
    async with service.database.write() as transaction:
        day = {"operations": 1, "tokens": 1, "kind": "sample", "base_model": BASE}
        days = [
            {**day, "tenant_id": cats.id, "day": f"{now - timedelta(days=number):%Y-%m-%d}"} for number in range(ROWS)
        ]
        await transaction.execute(insert(UsageDay), [*days, {**days[0], "tenant_id": dogs.id}])
        sums = dict.fromkeys(("operations", "failed", "train_tokens", "prompt_tokens", "cached_prompt_tokens"), 1)
        hour = {**sums, "sampled_tokens": 1, "session_id": "s", "run_id": "", "key_id": 0, "base_model": BASE}
        hours = [
            {**hour, "tenant_id": cats.id, "kind": "sample", "hour": now - timedelta(hours=number + 1)}
            for number in range(ROWS)
        ]
        await transaction.execute(insert(UsageHour), [*hours, {**hours[0], "tenant_id": dogs.id}])
        alert = {"scope": "tenant", "scope_id": "", "period": "day", "meter": "tokens", "amount": 10, "percent": 80}
        # Two of one time: the rest of the key orders them.
        times = [now - timedelta(days=number // 2) for number in range(ROWS)]
        alerts = [{**alert, "tenant_id": cats.id, "period_end": f"{n}", "at": at} for n, at in enumerate(times)]
        await transaction.execute(insert(BudgetAlert), [*alerts, {**alerts[0], "tenant_id": dogs.id}])
        spec, limits = (
            WebhookSpec("https://bell.example/", ["job.finished"]),
            Limits.of(service.services.runtime.settings),
        )
        bell = await set_webhook(transaction, cats.id, "bell", spec, networks=(), defaults=limits, now=now)
        for _ in range(ROWS):
            await send_test(transaction, bell.webhook, now)
    return {"tenant_id": cats.id, "name": "bell"}


async def pages(admin: Admin, path: str, **query: Any) -> list[list[Any]]:
    """Return the pages of a list."""
    found, after = list[list[Any]](), None
    while not found or after is not None:
        given = query if after is None else {**query, "after": after}
        page = (await admin.http.get(path, params=given)).raise_for_status().json()
        found.append(page["items"])
        after = page["next"]
    return found


def ageless(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without what changes by the second."""
    return {name: value for name, value in row.items() if name != "wait" and not name.endswith("_seconds")}


async def test_every_list_of_the_document_is_told_in_pages_and_each_row_once(
    admin: Admin, cats: Client, dogs: Client
) -> None:
    """The pages are those of one long page, cut."""
    names = await filled(admin, cats, dogs)
    found = dict(lists((await admin.http.get("/openapi.json")).raise_for_status().json()))
    assert WHOLE.keys() < found.keys()
    for template, parameters in found.items():
        path = template.format(**names)
        if template in WHOLE:
            assert "after" not in parameters, f"{path} has pages; take it off the list"
            continue
        assert {"limit", "after"} <= {*parameters}, f"{path} grows, and is told whole"
        query = QUERIES.get(template, {})
        (whole,) = await pages(admin, path, limit=200, **query)
        assert len(whole) >= ROWS, path
        cut = await pages(admin, path, limit=2, **query)
        assert [ageless(row) for page in cut for row in page] == [ageless(row) for row in whole], path
        assert {len(page) for page in cut} <= {1, 2}, path
        for limit in (0, 201):
            assert (await admin.http.get(path, params={**query, "limit": limit})).status_code == 400, path


async def test_a_list_of_one_tenant_has_no_rows_of_another(admin: Admin, cats: Client, dogs: Client) -> None:
    await filled(admin, cats, dogs)
    for path, query, tenant in (
        ("/runs", {"tenant_id": cats.id}, ("tenant_id", cats.id)),
        ("/sessions", {"tenant_id": cats.id}, ("tenant_id", cats.id)),
        ("/checkpoints", {"tenant_id": cats.id}, ("tenant_id", cats.id)),
        ("/alerts", {"tenant_id": cats.id}, ("tenant_id", cats.id)),
        ("/operations", {"tenant": "cats"}, ("tenant", "cats")),
        ("/usage", {"tenant": "cats"}, ("tenant", "cats")),
        (f"/tenants/{cats.id}/usage", SINCE, ("operations", 1)),
    ):
        found = await pages(admin, path, limit=2, **query)
        assert [len(page) for page in found] == [2, 2, 1], path
        assert {row[tenant[0]] for page in found for row in page} == {tenant[1]}, path


@pytest.mark.parametrize("path", ["/usage", "/alerts", "/tenants/{tenant_id}/usage"])
@pytest.mark.parametrize("after", ["x", "WzFd", "WyJhIiwiYiIsImMiLCJkIl0=", "WyIiLCIyMDI2LTAxLTAxIiwiXHUwMDAwIiwiIl0="])
async def test_a_cursor_that_no_answer_gave_is_refused(admin: Admin, cats: Client, path: str, after: str) -> None:
    query = QUERIES.get(path, {})
    refused = await admin.http.get(path.format(tenant_id=cats.id), params={**query, "after": after})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")


async def test_alerts_of_all_tenants_are_those_of_each_standing_the_newest_first(
    admin: Admin, cats: Client, dogs: Client
) -> None:
    """Each alert names its tenant, and whose budget it is."""
    clock = admin.service.clock
    (found,) = (await admin.http.get("/keys", params={"tenant_id": cats.id})).json()["items"]
    key = found["key_id"]
    for who, name, amount in (
        (cats, BudgetName(Period.DAY, key=key), 100),
        (dogs, BudgetName(Period.TOTAL), 100),
    ):
        async with admin.service.database.write() as transaction:
            await set_budget(transaction, who.id, name, amount, clock())
            spender = Spender(who.id, key if who is cats else None)
            await spend(transaction, [Spending(spender, BASE, clock(), {PricedQuantity.TRAIN_TOKENS: 100})], clock())
        clock.move(seconds=5)
    told = (await admin.http.get("/alerts")).raise_for_status().json()["items"]
    assert [(one["tenant"], one["key"], one["period"], one["percent"], one["amount"]) for one in told] == [
        ("dogs", None, "total", 100, "100"),
        ("dogs", None, "total", 80, "100"),
        ("cats", key, "day", 100, "100"),
        ("cats", key, "day", 80, "100"),
    ]
    for who in (cats, dogs):
        stands = (await admin.http.get(f"/tenants/{who.id}/standing")).json()["alerts"]
        same = ("key", "project", "period", "percent", "at")
        mine = [{name: one[name] for name in same} for one in told if one["tenant_id"] == who.id]
        assert [{name: one[name] for name in same} for one in stands] == mine
