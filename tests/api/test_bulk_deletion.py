"""A thousand checkpoints deleted by one request: audited one by one, in few statements, and felt by no other tenant."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from api.change_pace import ChangePace
from contracts.paths import Segment
from store.settings import Settings
from store.tables import AuditEntry, Checkpoint, DiscardedFolder
from tenants.audit_actions import Action
from tenants.checkpoints import NewCheckpoint, new_checkpoint_id, record_checkpoint
from tests.api.conftest import Service, Tenant
from tests.api.stalls import no_stall

MOST = 1000
MOST_STATEMENTS = 60
"""Most writing statements of the deletion, which takes paths and entries by the hundred."""


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(settings: Settings, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of either database."""
    if request.param == "sqlite":
        return settings
    # The deletion stands still in its transaction, for as long as a neighbour takes.
    monkeypatch.setattr("store.database.IDLE_SECONDS", 300.0)
    return settings.model_copy(update={"database_url": request.getfixturevalue("migrated_postgres_url")})


async def saved(service: Service, tenant: Tenant, run: str, count: int) -> list[str]:
    """Record so many checkpoints of the run; return their paths."""
    async with service.database.write() as transaction:
        for number in range(count):
            new = NewCheckpoint(new_checkpoint_id(), run, Segment.SAMPLER_WEIGHTS, f"one-{number}", 7, None, True, None)
            await record_checkpoint(transaction, tenant.id, new, service.clock)
    return [f"tinker://{run}/sampler_weights/one-{number}" for number in range(count)]


async def delete(tenant: Tenant, paths: list[str]) -> dict[str, object]:
    url = f"{tenant.service.url}/api/weft/v1/checkpoints/delete"
    answer = await tenant.http.post(url, json={"paths": paths})
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def writing(statement: str) -> bool:
    return statement.startswith(("INSERT INTO", "DELETE FROM", "UPDATE"))


async def entries(service: Service) -> list[tuple[str, str | None, str, str | None]]:
    """Return who deleted which checkpoint, of which project and with which key, in order."""
    async with service.database.read() as session:
        told = select(AuditEntry.tenant_id, AuditEntry.project, AuditEntry.resource_id, AuditEntry.key_id)
        rows = await session.execute(told.where(AuditEntry.action == Action.CHECKPOINT_DELETE).order_by(AuditEntry.id))
        return [tuple(row) for row in rows]


async def test_a_thousand_checkpoints_are_deleted_by_one_request_and_a_neighbour_is_answered_meanwhile(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    run, foreign = await cats.run(), await dogs.run()
    paths, theirs = await saved(service, cats, run, MOST), await saved(service, dogs, foreign, 1)
    sent: list[str] = []
    halfway, answered = asyncio.Event(), asyncio.Event()

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        """Hold the deletion before its second writing statement until the neighbour was answered.

        On SQLite statements run on the loop itself, where the longest stall says how long a neighbour waits.
        """
        if sum(map(writing, sent)) == 1 and writing(statement):
            halfway.set()
            if in_greenlet():
                await_only(answered.wait())
        sent.append(statement)

    event.listen(service.database.engine.sync_engine, "before_cursor_execute", note)
    async with no_stall(), asyncio.timeout(120):
        deleting = asyncio.create_task(delete(cats, paths))
        await halfway.wait()
        assert (await dogs.http.get("/checkpoints")).json()["checkpoints"][0]["tinker_path"] == theirs[0]
        answered.set()
        await deleting
    assert deleting.result() == {"deleted": MOST, "missing": []}
    assert len(list(filter(writing, sent))) < MOST_STATEMENTS
    told = await entries(service)
    assert [one[2] for one in told] == paths
    assert {one[:2] for one in told} == {(cats.id, cats.id)}
    assert len({one[3] for one in told}) == 1
    async with service.database.read() as session:
        left = (await session.execute(select(Checkpoint.tenant_id, func.count()).group_by(Checkpoint.tenant_id))).all()
        discarded = await session.scalar(select(func.count()).select_from(DiscardedFolder))
    assert ([tuple(one) for one in left], discarded) == ([(dogs.id, 1)], MOST)
    assert await delete(cats, paths) == {"deleted": 0, "missing": paths}
    assert len(await entries(service)) == MOST


async def test_a_refused_deletion_of_many_deletes_none_and_counts_none(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    """A tenant has changes left for some of them, but not for all."""
    now = 0.0
    service.services.admission.changes = pace = ChangePace(10, clock=lambda: now)
    run, foreign = await cats.run(), await dogs.run()
    paths, theirs = await saved(service, cats, run, 8), await saved(service, dogs, foreign, 8)
    pace.count(cats.id, 5)
    url = f"{service.url}/api/weft/v1/checkpoints/delete"
    refused = await cats.http.post(url, json={"paths": paths})
    assert refused.status_code == 429, refused.text
    assert int(refused.headers["retry-after"]) <= timedelta(hours=1).total_seconds()
    assert await entries(service) == []
    assert await delete(cats, paths[:5]) == {"deleted": 5, "missing": []}
    assert await delete(dogs, theirs) == {"deleted": 8, "missing": []}
    now = timedelta(hours=1).total_seconds()
    assert await delete(cats, paths) == {"deleted": 3, "missing": paths[:5]}
