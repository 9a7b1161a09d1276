"""Headers that the API adds to every answer, and the count of answers."""

import re

import pytest
from sqlalchemy import select

from contracts.operations import OptimStep
from store.tables import Operation
from telemetry.readiness import NotReady
from tests.api.conftest import Service, Tenant

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


async def test_every_answer_has_a_trace_id_the_clients_own_if_it_has_one(service: Service, cats: Tenant) -> None:
    assert (await cats.http.get("/get_server_capabilities", headers=PARENT)).headers["x-trace-id"] == TRACE
    for headers in ({}, {"traceparent": "00-not-one"}):
        made = [(await cats.http.get("/nowhere", headers=headers)).headers["x-trace-id"] for _ in range(2)]
        assert made[0] != made[1]
        assert re.fullmatch("[0-9a-f]{32}", made[0])


async def test_an_operation_keeps_the_trace_id_of_the_request_that_brought_it_first(cats: Tenant) -> None:
    run = await cats.run()
    body = {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}}
    await cats.http.post("/optim_step", json=body, headers=PARENT)
    await cats.http.post("/optim_step", json=body)
    async with cats.service.database.read() as session:
        (row,) = (await session.scalars(select(Operation))).all()
        ready = await cats.service.ledger.load(session, [row.id])  # type: ignore[list-item]
    assert row.trace_id == TRACE
    assert (ready[0].trace_id, ready[0].share, ready[0].accepted_at) == (TRACE, 1.0, cats.service.clock())
    assert isinstance(ready[0].payload, OptimStep)


@pytest.mark.parametrize(
    ("path", "route", "status"),
    [
        ("/api/v1/training_runs/some-run", "/api/v1/training_runs/{run_id}", "404"),
        ("/api/v1/healthz", "/api/v1/healthz", "200"),
        ("/healthz", "/healthz", "200"),
        ("/v1/models", "/v1/models", "200"),
        ("/ui", "/ui", "303"),
        ("/ui/runs/some-run", "/ui/runs/{run_id}", "303"),
        ("/api/v1/some/path/of/nobody", "unmatched", "404"),
    ],
)
async def test_requests_are_counted_by_template(
    service: Service, cats: Tenant, path: str, route: str, status: str
) -> None:
    await cats.http.get(f"{service.url}{path}")
    registry = service.services.runtime.telemetry.metrics.registry
    counted = {
        (sample.labels["route"], sample.labels["status"])
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "weft_http_requests_total"
    }
    assert counted == {(route, status)}


async def test_ready_says_which_part_is_not(service: Service, cats: Tenant) -> None:
    assert (await cats.http.get(f"{service.url}/readyz")).json() == {"ready": True, "parts": {}}

    async def broker() -> None:
        raise NotReady("does not answer")

    service.services.readiness.add("broker", broker)
    service.services.readiness.kept_seconds = 0.0
    answer = await cats.http.get(f"{service.url}/readyz", headers={"X-API-Key": "none"})
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "parts": {"broker": "does not answer"}})
