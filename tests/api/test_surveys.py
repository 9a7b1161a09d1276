"""Lists, searches and sums are surveys: they wait for their tenant's other ones, and for nobody else's."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
from sqlalchemy import insert, update

from api.dashboard.run_curves import FEW_POINTS
from store.fair_places import ask_for
from store.tables import Run, RunMetric, RunPoint
from tests.api.conftest import Service, Tenant, as_administrator
from tests.api.dashboard.test_long_curves import point
from tests.api.dashboard.visits import key_of, visitor

BY_STEP = "a page of an index by run and step"
READS = {
    "/api/weft/v1/runs/{run_id}": "one run, and its newest points",
    "/api/weft/v1/runs/{run_id}/points": BY_STEP,
    "/api/weft/v1/runs/{run_id}/metrics": BY_STEP,
    "/api/weft/v1/webhooks/{name}/events": "a page of an index by webhook",
}
"""Routes with a query that are no surveys, each with what bounds the rows that it goes through."""
QUERIES = {
    "/api/v1/audit": {"event_type": "all", "day": "2026-01-01"},
    "/api/v1/billing/usage/events": {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-01-02T00:00:00Z"},
    "/api/weft/v1/usage": {"since": "2026-01-01T00:00:00Z"},
    "/api/weft/v1/usage/export": {"since": "2026-01-01T00:00:00Z"},
}
LONG = 60.0
"""Seconds, for a slow machine."""


def routes(document: dict[str, Any]) -> Iterator[str]:
    """Yield the paths of all GETs that take a query."""
    for path, methods in document["paths"].items():
        if any(one["in"] == "query" for one in methods.get("get", {}).get("parameters", [])):
            yield path


async def until_waiting(service: Service, waiting: asyncio.Task[httpx.Response], path: str) -> None:
    """Return once the request waits for its survey. Fail if it is answered without one."""
    assert service.database.surveys is not None
    async with asyncio.timeout(LONG):
        while not service.database.surveys.places.waiting:
            assert not waiting.done(), f"{path} is answered without a survey: {waiting.result().text[:200]}"
            await asyncio.sleep(0)


async def test_every_list_waits_for_its_tenants_surveys_alone(service: Service, cats: Tenant, dogs: Tenant) -> None:
    for tenant in (cats, dogs):
        await as_administrator(tenant)
    found = list(routes(service.app.openapi()))
    assert set(READS) < set(found)
    assert service.database.surveys is not None
    for path in sorted(set(found) - set(READS)):
        address, query = service.url + path, QUERIES.get(path, {})
        ask_for(cats.id)
        async with service.database.surveys.places.place():
            waiting = asyncio.create_task(cats.http.get(address, params=query))
            await until_waiting(service, waiting, path)
            beside = await asyncio.wait_for(dogs.http.get(address, params=query), LONG)
            assert beside.status_code == 200, (path, beside.text)
            assert not waiting.done()
        assert (await asyncio.wait_for(waiting, LONG)).status_code == 200, path


async def test_whole_lists_a_search_of_sessions_and_a_trace_are_surveys(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    session = await cats.session()
    export = await cats.http.get(f"/sessions/{session}/trace_export")
    trace = httpx.URL(export.raise_for_status().json()["url"]).path
    assert service.database.surveys is not None
    for tenant in (cats, dogs):
        await as_administrator(tenant)
    for path, ask in {
        "standing": lambda tenant: tenant.http.get(f"{service.url}/api/weft/v1/usage/standing"),
        "keys": lambda tenant: tenant.http.get(f"{service.url}/api/weft/v1/keys"),
        "search": lambda tenant: tenant.http.post("/sessions/search", json={"limit": 5}),
        "trace": lambda tenant: tenant.http.get(service.url + trace),
        "models": lambda tenant: tenant.http.get(service.url + "/v1/models"),
    }.items():
        ask_for(cats.id)
        async with service.database.surveys.places.place():
            waiting = asyncio.create_task(ask(cats))
            await until_waiting(service, waiting, path)
            if path != "trace":
                assert (await asyncio.wait_for(ask(dogs), LONG)).status_code == 200
        assert (await asyncio.wait_for(waiting, LONG)).status_code == 200, path


async def test_a_long_curve_is_a_survey_and_a_short_one_is_not(service: Service, cats: Tenant, dogs: Tenant) -> None:
    """A volley of looks at long curves waits for its tenant's turn, off the event loop."""
    runs = [await tenant.run() for tenant in (cats, dogs)]
    for tenant, run in zip((cats, dogs), runs, strict=True):
        points = [point(tenant.id, run, step, 8.0) for step in range(1, FEW_POINTS + 2)]
        values = [
            {"run_id": run, "name": name, "step": step, "tenant_id": tenant.id, "value": 1.0, "at": service.clock()}
            for name, count in (("long", FEW_POINTS + 1), ("short", FEW_POINTS - 1))
            for step in range(count)
        ]
        async with service.database.write() as transaction:
            await transaction.execute(insert(RunPoint), points)
            await transaction.execute(insert(RunMetric), values)
            await transaction.execute(update(Run).where(Run.id == run).values(optimizer_steps=len(points)))
    keys = [(await key_of(service, tenant)).secret for tenant in (cats, dogs)]
    assert service.database.surveys is not None
    async with visitor(service, keys[0]) as mine, visitor(service, keys[1]) as theirs:
        for query in ("series=metric:long", "series=tokens", "begin=1&end=10000"):
            address, other = (f"/ui/runs/{run}/curve?{query}" for run in runs)
            ask_for(cats.id)
            async with service.database.surveys.places.place():
                waiting = asyncio.create_task(mine.get(address))
                await until_waiting(service, waiting, address)
                assert (await asyncio.wait_for(theirs.get(other), LONG)).json()["points"] > FEW_POINTS
                short = await asyncio.wait_for(mine.get(f"/ui/runs/{runs[0]}/curve?series=metric:short"), LONG)
                assert short.json()["points"] == FEW_POINTS - 1
            assert (await asyncio.wait_for(waiting, LONG)).json()["points"] == FEW_POINTS + 1, query
