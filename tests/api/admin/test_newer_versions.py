"""Words of a newer version in the database: an older process answers, and lets nothing through that it does not know."""

from datetime import timedelta
from typing import Any

import httpx
from sqlalchemy import insert, update

from contracts.ids import SessionId
from contracts.operations import OperationKind
from contracts.paths import CheckpointPath, Segment
from store.tables import (
    AdapterGate,
    ApiKey,
    Budget,
    BudgetAlert,
    DirectedReplica,
    DirectedRun,
    Operation,
    PoolState,
    ProcessKind,
    Rate,
    RateLineRow,
    Run,
    RunEvent,
    RunPoint,
    Sampler,
    Tenant,
    TenantPrice,
    WeightJob,
    WorkerProcess,
)
from tenants.downloads import make_link
from tenants.keys import create_key
from tenants.rights import KeyRights, Role, SuspendMode
from tenants.samplers import NewSampler, create_sampler
from tests.api.admin.conftest import Admin
from tests.api.conftest import BASE
from tests.api.conftest import Tenant as Client

NEW = "of-tomorrow"


async def store(admin: Admin, *statements: Any) -> None:
    async with admin.service.database.write() as transaction:
        for statement in statements:
            await transaction.execute(statement)


async def rows_of_a_newer_version(admin: Admin, who: Client) -> dict[str, str]:
    """Give a tenant a row with an unknown word wherever a row has one; return the names in paths."""
    session, now = await who.session(), admin.service.clock()
    run = await who.run(session=session)
    operation = await who.operation(run)
    async with admin.service.database.write() as transaction:
        new = NewSampler(SessionId(session), 0, BASE, live_run_id=run)
        sampler = await create_sampler(transaction, who.id, new, admin.service.clock)
    of_it: dict[str, Any] = {"tenant_id": who.id}
    rate = {"tat": 0.0, "per_second": 1.0, "burst": 1, "charged": 0, "returned": 0}
    budget = {"scope": "tenant", "scope_id": "", "meter": "tokens", "amount": 10}
    job = {"base_model": BASE, "body": b"?", "checkpoint_id": "a", "created_at": now}
    price = {"base_model": "", "amount": "2", "currency": "USD", "valid_from": now, "created_at": now}
    point = {"loss_weight": 1.0, "tokens": 1, "sampled_tokens": 0, "at": now}
    await store(
        admin,
        update(Run).where(Run.id == run).values(optimizer=NEW, optimizer_steps=1),
        update(Sampler).where(Sampler.id == sampler).values(max_version_lag=1, on_stale=NEW, swap_policy=NEW),
        update(Operation).where(Operation.id == operation).values(kind=NEW),
        insert(AdapterGate).values(
            run_id=run, base_model=BASE, generation=1, mode=NEW, since=now, **of_it, expires_at=now + timedelta(1)
        ),
        insert(DirectedRun).values(run_id=run, wanted="pin", since=now, **of_it),
        insert(RunEvent).values(run_id=run, kind=NEW, lease_token=1, at=now, **of_it),
        insert(RunPoint).values(run_id=run, step=1, loss_per=NEW, **point, **of_it),
        insert(Rate).values(meter=NEW, **rate, **of_it),
        insert(RateLineRow).values(scope="key", scope_id="1", meter=NEW, **rate, **of_it),
        insert(RateLineRow).values(scope=NEW, scope_id="1", meter="train", **rate, **of_it),
        insert(Budget).values(period="week", spent=10, **budget, **of_it),
        insert(BudgetAlert).values(period="week", period_end="", percent=80, at=now, **budget, **of_it),
        insert(TenantPrice).values(meter=NEW, **price, **of_it),
        insert(WeightJob).values(id="job", kind=NEW, state=NEW, **job, **of_it),
        update(Tenant).where(Tenant.id == who.id).values(service_class=NEW, limits={NEW: 1, "keys": 50}),
    )
    return {"tenant": who.id, "session": session, "run": run, "operation": operation, "sampler": sampler}


async def keyed(admin: Admin, who: Client, role: str) -> tuple[str, int]:
    """Make a key, and give it the role."""
    async with admin.service.database.write() as transaction:
        key = await create_key(
            transaction, tenant=who.id, note="", clock=admin.service.clock, rights=KeyRights(Role.ADMIN)
        )
        await transaction.execute(update(ApiKey).where(ApiKey.id == key.id).values(role=role))
    return key.secret, key.id


OPERATORS = (
    "/tenants",
    "/tenants/{tenant}",
    "/tenants/{tenant}/standing",
    "/tenants/{tenant}/prices",
    "/tenants/{tenant}/projects",
    "/tenants/{tenant}/webhooks",
    "/keys",
    "/runs",
    "/runs/{run}",
    "/sessions/{session}",
    "/operations",
    "/operations/{operation}",
    "/gates",
    "/gates/adapter/{run}",
    "/replicas",
    "/pools",
    "/trainers",
    "/apis",
    "/queue",
    "/shares",
    "/overview",
    "/audit",
)
TENANTS = (
    "/api/v1/training_runs",
    "/api/v1/training_runs/{run}",
    "/api/v1/samplers/{sampler}",
    "/api/v1/samplers/{sampler}/staleness",
    "/api/v1/adapters/{run}",
    "/api/weft/v1/adapters",
    "/api/weft/v1/keys",
    "/api/weft/v1/usage/standing",
    "/api/weft/v1/jobs",
    "/api/weft/v1/jobs/job",
    "/api/weft/v1/runs",
    "/api/weft/v1/runs/{run}",
    "/api/weft/v1/runs/{run}/points",
    "/api/weft/v1/runs/{run}/marks",
    "/api/weft/v1/operations",
)


async def test_every_answer_is_given_over_rows_of_a_newer_version(admin: Admin, cats: Client, dogs: Client) -> None:
    names = await rows_of_a_newer_version(admin, cats)
    now = admin.service.clock()
    process: dict[str, Any] = {"base_model": BASE, "host": "h", "pid": 1, "started_at": now, "expires_at": now}
    replicas = [{"name": name, "condition": word, "adapters": 1} for name, word in (("a", NEW), ("b", "works"))]
    pool = {"kind": ProcessKind.POOL, "pool_state": NEW, "replicas": replicas}
    await store(
        admin,
        insert(WorkerProcess).values(id="pool", **pool, **process),
        insert(WorkerProcess).values(id="other", kind=NEW, **process),
        insert(DirectedReplica).values(base_model=BASE, replica="a", wanted=NEW, since=now),
    )
    for path in OPERATORS:
        answer = await admin.http.get(path.format(**names))
        assert answer.status_code == 200, (path, answer.text)
    (told,) = (await admin.http.get("/pools")).json()["items"]
    assert told["state"] == PoolState.NO_REPLICA
    shown = (await admin.http.get("/replicas")).json()["items"]
    assert [(one["replica"], one["condition"], one["directive"]) for one in shown] == [
        ("a", None, "drain"),
        ("b", "works", None),
    ]
    details = (await admin.http.get(f"/runs/{names['run']}")).json()
    assert (details["directive"], details["events"]) == (None, [])
    assert (await admin.http.get(f"/operations/{names['operation']}")).json()["kind"] == OperationKind.UNKNOWN
    requeued = await admin.http.post(f"/operations/{names['operation']}/requeue")
    assert requeued.status_code == 200, requeued.text

    theirs = {**names, "run": await dogs.run()}
    for who, ids, foreign in ((cats, names, ()), (dogs, theirs, ("{sampler}", "/staleness", "/job"))):
        secret, _ = await keyed(admin, who, Role.ADMIN)
        for path in TENANTS:
            url, status = admin.service.url + path.format(**ids), 404 if path.endswith(foreign) else 200
            answer = await who.http.get(url, headers={"X-API-Key": secret})
            assert answer.status_code == status, (path, answer.text)
    stands = (await admin.http.get(f"/tenants/{cats.id}/standing")).json()
    assert (stands["rates"], stands["budgets"], stands["alerts"]) == ([], [], [])


async def test_a_role_of_a_newer_version_may_do_nothing_and_is_not_handed_on(
    admin: Admin, cats: Client, dogs: Client
) -> None:
    """An older process cannot tell what the role may, so no key of it does more there than its holder could."""
    (secret, number), (boss, _) = await keyed(admin, cats, NEW), await keyed(admin, cats, "admin")
    url = admin.service.url
    async with httpx.AsyncClient(base_url=url, headers={"X-API-Key": secret}, timeout=40) as http:
        for path in ("/api/v1/training_runs", "/api/weft/v1/keys", "/api/weft/v1/usage/standing"):
            refused = await http.get(path)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden"), path
        assert (await http.get("/api/v1/auth/apikey/me")).status_code == 200
    async with httpx.AsyncClient(base_url=url, headers={"X-API-Key": boss}, timeout=40) as http:
        shown = {one["key_id"]: one for one in (await http.get("/api/weft/v1/keys")).json()["keys"]}
        assert (shown[number]["role"], shown[number]["scopes"]) == ("unknown", [])
        rotated = await http.post(f"/api/weft/v1/keys/{number}/rotate", json={})
        assert (rotated.status_code, rotated.json()["code"]) == (400, "invalid_request")
        made = await http.post("/api/weft/v1/keys", json={"role": "unknown"})
        assert (made.status_code, made.json()["code"]) == (400, "invalid_request")
    assert (await dogs.http.get("/training_runs")).status_code == 200
    assert (await cats.http.get("/training_runs")).status_code == 200


async def test_a_suspension_of_a_newer_version_counts_as_the_strictest(
    admin: Admin, cats: Client, dogs: Client
) -> None:
    links = {}
    for who in (cats, dogs):
        held = await who.run()
        await who.checkpoint(held, "linked")
        async with admin.service.database.write() as transaction:
            path = CheckpointPath(held, Segment.WEIGHTS, "linked")
            links[who.id] = (await make_link(transaction, who.id, path, admin.service.clock)).secret
    now = admin.service.clock()
    await store(
        admin,
        update(Tenant).where(Tenant.id == cats.id).values(suspended_at=now, suspend_mode=NEW, suspend_reason="move"),
    )
    refused = await cats.http.get("/training_runs")
    assert (refused.status_code, refused.json()["code"]) == (403, "suspended")
    assert (await dogs.http.get("/training_runs")).status_code == 200
    for who, status in ((cats, 404), (dogs, 200)):
        assert (await who.http.get(f"/downloads/{links[who.id]}/archive.tar")).status_code == status
    shown = (await admin.http.get(f"/tenants/{cats.id}")).raise_for_status().json()
    assert shown["suspension"]["mode"] == SuspendMode.BLOCKED
    loads = {one["id"]: one["suspension"] for one in (await admin.http.get("/overview")).json()["tenants"]}
    assert loads[cats.id] == SuspendMode.BLOCKED
