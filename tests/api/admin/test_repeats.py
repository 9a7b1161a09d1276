"""An operator's change whose answer is lost is sent again: it is answered like the first, and has no second effect."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta

import httpx
from sqlalchemy import func, select, update

from store.clock import utc_now
from store.tables import AuditEntry, DirectedRun, OperatorAnswer, Run, Session, WebhookEvent, WorkerProcess
from tenants.operator_answers import forget_answers
from tenants.run_directives import lift_run_directives
from tests.api.admin.conftest import Admin
from tests.api.conftest import BASE, Tenant

WITHOUT_KEY = {
    "/admin/v1/tenants/{tenant_id}/projects": "a repeat finds the project of that name",
    "/admin/v1/tenants/{tenant_id}/webhooks/{name}/events/{event_id}/retry": "a repeat is sent under the same id",
    "/admin/v1/housekeeping/runs": "a repeat finds nothing left to do",
}
"""Paths of the requests that a repeat of may be made without an ``Idempotency-Key``, and why."""


@dataclass
class Sent:
    """Sends changes of one operator with an ``Idempotency-Key``."""

    admin: Admin

    async def __call__(self, path: str, body: dict | None = None, *, key: str) -> httpx.Response:
        return await self.admin.http.post(path, json=body, headers={"Idempotency-Key": key})

    async def entries(self, tenant: str | None) -> int:
        async with self.admin.service.database.read() as session:
            count = select(func.count()).select_from(AuditEntry)
            return await session.scalar(count.where(AuditEntry.tenant_id == tenant)) or 0


async def trained(admin: Admin, tenant: Tenant) -> str:
    """A run with an operation, which a living trainer leases."""
    run = await tenant.run()
    now = utc_now()
    async with admin.service.database.write() as transaction:
        names = [f"{tenant.id}-{number}" for number in range(2)]
        for name in names:
            lease = {"started_at": now, "expires_at": now + timedelta(days=3650)}
            transaction.add(WorkerProcess(id=name, kind="trainer", base_model=BASE, host="h", pid=1, **lease))
        await transaction.flush()
        await transaction.execute(update(Run).where(Run.id == run).values(trainer_id=names[0]))
    return run


async def test_the_end_of_a_session_is_told_again_with_what_it_has_cancelled(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    sent, run, other = Sent(admin), await cats.run(), await dogs.run()
    await cats.operation(run, 1)
    await dogs.operation(other, 1)
    path = f"/sessions/{run.partition(':')[0]}/end"
    first, second = await asyncio.gather(*(sent(path, {"reason": "over"}, key="one") for _ in range(2)))
    assert first.json() == second.json() == {"id": run.partition(":")[0], "cancelled": 1}
    assert (await sent(path, {"reason": "over"}, key="two")).json()["cancelled"] == 0
    assert await sent.entries(cats.id) == 1
    async with admin.service.database.read() as session:
        assert (await session.get_one(Session, other.partition(":")[0])).ended_at is None


async def test_a_requeue_fences_the_trainer_once(admin: Admin, cats: Tenant, dogs: Tenant) -> None:
    sent, run, other = Sent(admin), await trained(admin, cats), await trained(admin, dogs)
    operation, beside = await cats.operation(run, 1), await dogs.operation(other, 1)

    async def tokens() -> list[int]:
        async with admin.service.database.read() as session:
            return [(await session.get_one(Run, one)).lease_token for one in (run, other)]

    before = await tokens()
    answers = [await sent(f"/operations/{operation}/requeue", key="one") for _ in range(3)]
    assert {answer.text for answer in answers} == {answers[0].raise_for_status().text}
    assert await tokens() == [before[0] + 1, before[1]]
    refused = await sent(f"/operations/{beside}/requeue", key="one")
    assert (refused.status_code, "another request" in refused.text) == (400, True)
    assert await tokens() == [before[0] + 1, before[1]]
    assert [await sent.entries(tenant.id) for tenant in (cats, dogs)] == [1, 0]


async def test_a_move_that_was_carried_out_is_not_asked_for_again(admin: Admin, cats: Tenant, dogs: Tenant) -> None:
    sent, run, other = Sent(admin), await trained(admin, cats), await trained(admin, dogs)
    for what, to in (("move", {"to": None}), ("eviction", {})):
        path, body = f"/runs/{run}/{what}", {"reason": "disk", **to}
        first = (await sent(path, body, key=what)).raise_for_status()
        async with admin.service.database.write() as transaction:
            await lift_run_directives(transaction, [run])
        assert (await sent(path, body, key=what)).json() == first.json()
        async with admin.service.database.read() as session:
            assert list(await session.scalars(select(DirectedRun.run_id))) == []
    assert await sent.entries(cats.id) == 2
    async with admin.service.database.read() as session:
        assert (await session.get_one(Run, other)).trainer_id == f"{dogs.id}-0"


async def test_an_end_of_an_operation_and_a_price_are_told_again(admin: Admin, cats: Tenant, dogs: Tenant) -> None:
    sent, run = Sent(admin), await cats.run()
    one, two, three = [await cats.operation(run, number) for number in (1, 2, 3)]
    for path, body in (
        (f"/operations/{one}/cancellation", {"reason": "wrong data"}),
        (f"/operations/{two}/failure", {}),
        ("/prices", {"meter": "train_tokens", "amount": "1.5"}),
    ):
        first = (await sent(path, body, key=path)).raise_for_status()
        assert (await sent(path, body, key=path)).json() == first.json()
        assert (await sent(path, body, key=f"{path}/2")).status_code == 400
    assert (await sent.entries(cats.id), await sent.entries(None), await sent.entries(dogs.id)) == (2, 1, 0)
    # What is refused is not remembered: it may be sent again once it can be done.
    refused = f"/operations/{three}0/failure"
    assert (await sent(refused, {}, key="later")).status_code == 404
    assert (await sent(f"/operations/{three}/failure", {}, key="later")).status_code == 200


async def test_answers_are_forgotten(admin: Admin, cats: Tenant) -> None:
    sent, run = Sent(admin), await cats.run()
    for number in (1, 2):
        operation = await cats.operation(run, number)
        await sent(f"/operations/{operation}/failure", {}, key=str(number))
        admin.service.clock.move(hours=1)
    async with admin.service.database.write() as transaction:
        hour = admin.service.clock() - timedelta(minutes=90)
        assert await forget_answers(transaction, before=hour, most=10) == 1
    async with admin.service.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(OperatorAnswer)) == 1


async def test_each_request_that_a_repeat_would_do_again_takes_a_key(admin: Admin) -> None:
    document = (await admin.http.get("/openapi.json")).raise_for_status().json()
    posts = {path: one["post"] for path, one in document["paths"].items() if "post" in one}
    takes = {
        path
        for path, one in posts.items()
        if "idempotency-key" in {parameter["name"].lower() for parameter in one.get("parameters", ())}
    }
    assert set(posts) - takes == set(WITHOUT_KEY)


async def administrate(admin: Admin, tenant: Tenant) -> None:
    """Have the tenant's client send an administrator's key."""
    made = await admin.http.post(f"/tenants/{tenant.id}/keys", json={"role": "admin"})
    tenant.http.headers["X-API-Key"] = made.raise_for_status().json()["secret"]


async def test_a_webhook_gets_another_secret_and_a_test_once_by_either_door(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    for tenant in (cats, dogs):
        await administrate(admin, tenant)
        made = await tenant.http.put(
            f"{tenant.service.url}/api/weft/v1/webhooks/bell", json={"url": "https://bell.example/"}
        )
        made.raise_for_status()
    before = [
        (await one.http.get(f"{one.service.url}/api/weft/v1/webhooks/bell/secret")).json()["secret"]
        for one in (cats, dogs)
    ]
    doors = (
        (admin.http, f"/tenants/{cats.id}/webhooks/bell"),
        (cats.http, f"{cats.service.url}/api/weft/v1/webhooks/bell"),
    )
    secrets, tests = set(), set()
    for http, path in doors:
        for what, field, found in (("secret", "secret", secrets), ("test", "id", tests)):
            answers = await asyncio.gather(
                *(http.post(f"{path}/{what}", headers={"Idempotency-Key": "one"}) for _ in range(3))
            )
            told = {answer.raise_for_status().json()[field] for answer in answers}
            assert len(told) == 1
            found |= told
            found.add((await http.post(f"{path}/{what}", headers={"Idempotency-Key": "two"})).json()[field])
    # Two doors, each with two keys: four secrets besides the first one, four tests.
    assert (len(secrets), len(tests), before[0] in secrets) == (4, 4, False)
    async with admin.service.database.read() as session:
        count = select(func.count()).select_from(WebhookEvent)
        assert await session.scalar(count) == 4
        for action in ("webhook_rotate", "webhook_test"):
            entries = select(func.count()).select_from(AuditEntry).where(AuditEntry.action == action)
            assert await session.scalar(entries) == 4
    assert (await dogs.http.get(f"{dogs.service.url}/api/weft/v1/webhooks/bell/secret")).json()["secret"] == before[1]
    # Of more than five secrets at once none is made.
    assert (await cats.http.post(f"{cats.service.url}/api/weft/v1/webhooks/bell/secret")).status_code == 400


async def test_two_changes_of_other_parts_of_a_webhook_do_not_undo_each_other(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    for tenant in (cats, dogs):
        await administrate(admin, tenant)
        new = {"url": "https://bell.example/", "events": ["job.finished"], "note": "of ann"}
        (await tenant.http.put(f"{tenant.service.url}/api/weft/v1/webhooks/bell", json=new)).raise_for_status()
    (await admin.http.put(f"/tenants/{cats.id}/webhooks/bell", json={"is_enabled": False})).raise_for_status()
    (await cats.http.put(f"{cats.service.url}/api/weft/v1/webhooks/bell", json={"note": "of bob"})).raise_for_status()
    told = [
        (await one.http.get(f"{one.service.url}/api/weft/v1/webhooks")).json()["webhooks"][0] for one in (cats, dogs)
    ]
    assert [(one["url"], one["events"], one["note"], one["is_enabled"]) for one in told] == [
        ("https://bell.example/", ["job.finished"], "of bob", False),
        ("https://bell.example/", ["job.finished"], "of ann", True),
    ]
    refused = await cats.http.put(f"{cats.service.url}/api/weft/v1/webhooks/second", json={"note": "without a url"})
    assert (refused.status_code, "url" in refused.json()["detail"]) == (400, True)
