"""A project that runs into a limit of its own is told so by its name; other projects and tenants do not notice."""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update
from weft_client import AsyncWeft

from contracts.errors import StorageFull
from contracts.operations import OptimStepped
from contracts.paths import Segment
from store.clock import utc_now
from store.settings import Settings
from store.tables import AuditEntry, Checkpoint, Run
from tenants.checkpoints import NewCheckpoint, new_checkpoint_id
from tenants.keys import create_key
from tenants.limits import Counted, Limits, hold_count
from tenants.project_limits import set_project_limits
from tenants.projects import create_project
from tenants.rights import KeyRights, Role
from tenants.runs import open_run_within_limit
from tenants.storage import store_checkpoint
from tests.api.conftest import BASE, Service, Tenant, as_administrator

DEFAULTS = Limits.of(Settings())


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Requests without room are answered at once."""
    return settings.model_copy(update={"poll_hold": timedelta(seconds=0.01)})


async def project(tenant: Tenant, name: str, **limits: int) -> str:
    """Make a project with limits of its own."""
    async with tenant.service.database.write() as transaction:
        made = await create_project(transaction, tenant.id, name, tenant.service.clock)
        await set_project_limits(transaction, tenant.id, made.id, limits, utc_now)
    return made.id


async def opened(tenant: Tenant, project: str | None = None, **headers: str) -> httpx.Response:
    """Ask for a session in a project."""
    return await tenant.http.post("/create_session", json={"project_id": project}, headers=headers)


async def session_in(tenant: Tenant, project: str | None = None) -> str:
    made: str = (await opened(tenant, project)).raise_for_status().json()["session_id"]
    return made


async def sampler_in(tenant: Tenant, project: str | None = None) -> str:
    body = {"session_id": await session_in(tenant, project), "sampling_session_seq_id": 0, "base_model": BASE}
    made = await tenant.http.post("/create_sampling_session", json=body)
    sampler: str = made.raise_for_status().json()["sampling_session_id"]
    return sampler


async def sample(tenant: Tenant, sampler: str, seq_id: int) -> httpx.Response:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 8},
    }
    return await tenant.http.post("/asample", json=body)


async def test_a_session_beyond_its_projects_limit_is_refused_by_the_projects_name(cats: Tenant, dogs: Tenant) -> None:
    await project(cats, "small", sessions=1)
    first = await opened(cats, "small", **{"X-Idempotency-Key": "one"})
    refused = await opened(cats, "small")
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_sessions")
    assert "1 sessions are open in project 'small', and its limit is 1" in refused.json()["detail"]
    assert (await opened(cats, "small", **{"X-Idempotency-Key": "one"})).json() == first.json()
    assert [(await opened(one)).status_code for one in (cats, dogs)] == [200, 200]
    await cats.http.post(f"/sessions/{first.json()['session_id']}/finish", json={})
    assert (await opened(cats, "small")).status_code == 200


async def test_a_model_beyond_its_projects_limit_waits_and_another_projects_is_made(cats: Tenant, dogs: Tenant) -> None:
    await project(cats, "small", open_runs=1)
    await cats.run(session=await session_in(cats, "small"))
    creations = {
        name: {"session_id": await session_in(cats, name), "model_seq_id": 0, "base_model": BASE}
        for name in ("small", "default")
    }
    reasons: dict[str, str] = {}
    may_open: dict[str, bool] = {}
    for name, creation in creations.items():
        promise = (await cats.http.post("/create_model", json=creation)).raise_for_status().json()
        waits = await cats.http.post("/retrieve_future", json={"request_id": promise["request_id"]})
        reasons[name] = waits.json()["queue_state_reason"]
        async with cats.service.database.write() as transaction:
            run = f"{creation['session_id']}:train:0"
            may_open[name] = await open_run_within_limit(transaction, cats.id, run, DEFAULTS)
    assert "1 models are open in project 'small', and its limit is 1" in reasons["small"]
    assert "project" not in reasons["default"]
    assert may_open == {"small": False, "default": True}


async def test_a_larger_rank_than_its_limit_is_refused_by_the_projects_name(cats: Tenant, dogs: Tenant) -> None:
    """A model, and a copy of one; the rank of the limit itself is made. The limit is told where the others are."""
    await project(cats, "small", max_rank=7)
    source = await cats.run()
    await cats.checkpoint(source, "one")

    async def model(tenant: Tenant, session: str, number: int, rank: int) -> httpx.Response:
        body = {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": rank}}
        return await tenant.http.post("/create_model", json=body)

    mine, beside, theirs = await session_in(cats, "small"), await session_in(cats), await session_in(dogs)
    copied = {"source_path": f"tinker://{source}/weights/one"}
    refused = [
        await model(cats, mine, 0, 8),
        await cats.http.post("/copy_weights", json=copied | {"destination_project_id": "small"}),
        await cats.http.post("/copy_weights", json=copied | {"session_id": mine, "model_seq_id": 0}),
    ]
    assert {(one.status_code, one.json()["detail"]) for one in refused} == {
        (403, "adapters of project 'small' are of rank 7 at most; got rank 8")
    }
    made = [await model(cats, mine, 0, 7), await model(cats, beside, 0, 8), await model(dogs, theirs, 0, 8)]
    made.append(await cats.http.post("/copy_weights", json=copied))
    assert [one.status_code for one in made] == [200] * 4


async def test_a_sample_beyond_its_projects_limit_comes_again(cats: Tenant, dogs: Tenant) -> None:
    await project(cats, "small", pending_samples=2)
    mine, beside, theirs = await sampler_in(cats, "small"), await sampler_in(cats), await sampler_in(dogs)
    assert [(await sample(cats, mine, number)).status_code for number in (0, 1)] == [200, 200]
    refused = await sample(cats, mine, 2)
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_samples")
    assert "2 sample requests are pending in project 'small', and its limit is 2" in refused.json()["detail"]
    assert (await sample(cats, mine, 1)).status_code == 200
    assert [(await sample(cats, beside, number)).status_code for number in range(3)] == [200] * 3
    assert [(await sample(dogs, theirs, number)).status_code for number in range(3)] == [200] * 3


async def step(tenant: Tenant, run: str, seq_id: int) -> httpx.Response:
    return await tenant.http.post("/optim_step", json={"model_id": run, "seq_id": seq_id})


class TestPendingTraining:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"poll_hold": timedelta(seconds=0.3)})

    async def test_training_beyond_its_projects_limit_comes_again_and_another_projects_goes_on(
        self, service: Service, cats: Tenant, dogs: Tenant
    ) -> None:
        """A repeat is answered, and the operation comes in once another has been done, of whichever run of the project."""
        await project(cats, "small", pending_operations=2)
        mine, second = [await cats.run(session=await session_in(cats, "small")) for _ in range(2)]
        beside, theirs = await cats.run(session=await session_in(cats)), await dogs.run()
        assert [(await step(cats, run, 1)).status_code for run in (mine, second)] == [200, 200]
        refused = await step(cats, mine, 2)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_operations")
        assert "pending training of project 'small' takes 2 of 2 operations;" in refused.json()["detail"]
        assert (await step(cats, mine, 1)).status_code == 200
        for tenant, run in ((cats, beside), (dogs, theirs)):
            assert [(await step(tenant, run, number)).status_code for number in (1, 2, 3)] == [200] * 3
        await service.run_next(OptimStepped({}))
        assert (await step(cats, mine, 2)).status_code == 200

    async def test_an_operation_that_its_projects_bytes_never_hold_fails_and_the_run_goes_on(
        self, cats: Tenant, dogs: Tenant
    ) -> None:
        await project(cats, "small", pending_bytes=1)
        mine, theirs = await cats.run(session=await session_in(cats, "small")), await dogs.run()
        promises = [(await step(tenant, run, 1)).json() for tenant, run in ((cats, mine), (dogs, theirs))]
        found = await cats.http.post("/retrieve_future", json={"request_id": promises[0]["request_id"]})
        assert "the limit for all pending training together is 1" in found.json()["error"]
        waits = await dogs.http.post("/retrieve_future", json={"request_id": promises[1]["request_id"]})
        assert waits.status_code == 408

    async def test_exactly_as_many_as_the_limit_are_pending_however_many_ask_at_once(
        self, cats: Tenant, dogs: Tenant
    ) -> None:
        await project(cats, "small", pending_operations=5)
        runs = [await cats.run(session=await session_in(cats, "small")) for _ in range(12)]
        theirs = [await dogs.run() for _ in range(12)]
        asked = [step(cats, run, 1) for run in runs] + [step(dogs, run, 1) for run in theirs]
        statuses = [answer.status_code for answer in await asyncio.gather(*asked)]
        assert sorted(statuses[:12]) == [200] * 5 + [429] * 7
        assert statuses[12:] == [200] * 12


async def save(tenant: Tenant, run: Any, name: str) -> None:
    new = NewCheckpoint(new_checkpoint_id(), run, Segment.WEIGHTS, name, 100, None, True, None)
    async with tenant.service.database.write() as transaction:
        await hold_count(transaction, Counted.STORAGE, [tenant.id])
        await store_checkpoint(transaction, tenant.id, new, tenant.service.clock, DEFAULTS)


async def test_a_save_beyond_its_projects_storage_fails_and_another_projects_goes_on(cats: Tenant) -> None:
    await project(cats, "small", stored_bytes=250, checkpoints=9)
    mine, beside = [await cats.run(session=await session_in(cats, name)) for name in ("small", "default")]
    await save(cats, mine, "a")
    await save(cats, mine, "b")
    with pytest.raises(StorageFull, match=r"project 'small' .*take 300 of 250 bytes and 3 of 9 checkpoints"):
        await save(cats, mine, "c")
    for name in "abc":
        await save(cats, beside, name)


async def test_a_projects_checkpoints_are_kept_as_the_smaller_limit_says(service: Service, cats: Tenant) -> None:
    await project(cats, "small", kept_checkpoints=1, checkpoint_seconds=60)
    mine, beside = [await cats.run(session=await session_in(cats, name)) for name in ("small", "default")]
    for run in (mine, beside):
        await save(cats, run, "a")
        await save(cats, run, "b")
    async with service.database.read() as session:
        rows = await session.execute(select(Checkpoint.run_id, Checkpoint.name, Checkpoint.expires_at))
        expiry = {(run, name): expires for run, name, expires in rows}
    now = service.clock()
    assert (expiry[beside, "a"], expiry[beside, "b"]) == (None, None)
    newest, older = expiry[mine, "b"], expiry[mine, "a"]
    assert newest is not None
    assert older is not None
    assert older <= now < newest <= now + timedelta(seconds=60)


@pytest.mark.parametrize(("asked", "seconds"), [(None, 60), (3600, 60), (30, 30)])
async def test_no_time_to_live_is_longer_than_the_projects_limit_lets_a_checkpoint_be_kept(
    service: Service, cats: Tenant, dogs: Tenant, asked: int | None, seconds: int
) -> None:
    """Another project's checkpoint and another tenant's get the time that was asked for; no limit is too long to count."""
    await project(cats, "small", checkpoint_seconds=60)
    await project(dogs, "small", checkpoint_seconds=2**53)
    runs = [
        (cats, await cats.run(session=await session_in(cats, "small")), seconds),
        (cats, await cats.run(session=await session_in(cats, "default")), asked),
        (dogs, await dogs.run(session=await session_in(dogs, "small")), asked or 3653 * 86_400),
    ]
    for tenant, run, kept in runs:
        await save(tenant, run, "a")
        path = f"/training_runs/{run}/checkpoints/weights/a/ttl"
        assert (await tenant.http.put(path, json={"ttl_seconds": asked})).status_code == 204
        async with service.database.read() as session:
            expires = await session.scalar(select(Checkpoint.expires_at).where(Checkpoint.run_id == run))
        assert expires == (None if kept is None else service.clock() + timedelta(seconds=kept))


async def key_of(tenant: Tenant, rights: KeyRights) -> dict[str, str]:
    """Headers with a new key of these rights."""
    async with tenant.service.database.write() as transaction:
        key = await create_key(transaction, tenant=tenant.id, note="", clock=tenant.service.clock, rights=rights)
    return {"X-API-Key": key.secret}


async def test_a_session_that_moves_takes_its_use_with_it(cats: Tenant) -> None:
    small = await project(cats, "small", open_runs=1, sessions=1)
    session, arriving = await session_in(cats, "small"), await session_in(cats)
    run = await cats.run(session=session)
    admin = await key_of(cats, KeyRights(role=Role.ADMIN))
    moved = await cats.http.put(f"/sessions/{arriving}/project", json={"project_id": small}, headers=admin)
    assert moved.status_code == 204
    await cats.run(session=arriving)
    assert (await opened(cats, "small")).status_code == 429
    for one in (session, arriving):
        assert (await cats.http.put(f"/sessions/{one}/project", json={"project_id": "default"})).status_code == 204
    assert (await opened(cats, "small")).status_code == 200
    assert (await cats.http.post("/optim_step", json={"model_id": run, "seq_id": 1})).status_code == 200


async def test_a_session_moves_into_no_project_that_it_does_not_fit_into(cats: Tenant, dogs: Tenant) -> None:
    """A key that may set no limits is refused; the tenant's administrator moves it all the same."""
    large, small = await project(cats, "large"), await project(cats, "small", open_runs=1, sessions=2, max_rank=8)
    theirs = await session_in(dogs)
    member = await key_of(cats, KeyRights(role=Role.MEMBER, projects=frozenset({large, small})))
    admin = await key_of(cats, KeyRights(role=Role.ADMIN))

    async def moved(session: str, by: dict[str, str] = member) -> httpx.Response:
        return await cats.http.put(f"/sessions/{session}/project", json={"project_id": small}, headers=by)

    first, second, third, fourth = [await session_in(cats, "large") for _ in range(4)]
    runs = [await cats.run(session=session) for session in (first, second, third)]
    async with cats.service.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == runs[-1]).values(rank=16))
    refused = await moved(third)
    assert (refused.status_code, "rank 8 at most" in refused.text) == (403, True)
    assert (await moved(first)).status_code == 204
    refused = await moved(second)
    assert (refused.status_code, "2 of 1 open_runs" in refused.text) == (403, True)
    assert (await moved(fourth)).status_code == 204
    assert (await moved(theirs)).status_code == 404
    assert (await moved(second, admin)).status_code == 204


async def test_standing_tells_projects_limits_as_they_are_enforced(cats: Tenant, dogs: Tenant) -> None:
    await project(cats, "small", sessions=1, open_runs=5, kept_checkpoints=3)
    await cats.run(session=await session_in(cats, "small"))

    async def standing(tenant: Tenant) -> list[dict[str, Any]]:
        answer = await tenant.http.get(f"{tenant.service.url}/api/weft/v1/usage/standing")
        found: list[dict[str, Any]] = answer.raise_for_status().json()["projects"]
        return found

    (one,) = await standing(cats)
    assert one["name"] == "small"
    assert [(limit["name"], limit["value"], limit["used"], limit["is_reached"]) for limit in one["limits"]] == [
        ("kept_checkpoints", 3, None, False),
        ("open_runs", 5, 1, False),
        ("sessions", 1, 1, True),
    ]
    assert await standing(dogs) == []


async def test_an_administrator_without_bounds_sets_projects_limits_and_nobody_else(cats: Tenant, dogs: Tenant) -> None:
    small = await project(cats, "small")
    path = f"{cats.service.url}/api/weft/v1/projects/small/limits"

    async def put(rights: KeyRights, tenant: Tenant = cats) -> httpx.Response:
        async with tenant.service.database.write() as transaction:
            key = await create_key(transaction, tenant=tenant.id, note="", clock=tenant.service.clock, rights=rights)
        headers = {"X-API-Key": key.secret}
        return await tenant.http.put(path, json={"limits": {"sessions": 2}}, headers=headers)

    admin = KeyRights(role=Role.ADMIN)
    refused = [KeyRights(role=Role.MEMBER), KeyRights(role=Role.ADMIN, projects=frozenset({small}))]
    assert [(await put(rights)).status_code for rights in refused] == [403, 403]
    assert (await put(admin, dogs)).status_code == 404
    assert (await put(admin)).json()["limits"] == {"sessions": 2}
    async with cats.service.database.read() as session:
        rows = await session.scalars(select(AuditEntry).where(AuditEntry.action == "project_set"))
        assert [(one.tenant_id, one.project, one.after) for one in rows] == [
            (cats.id, small, {"limits": {"sessions": 2}})
        ]


@pytest.mark.parametrize("name", ["cats/one", "a/limits", "/edge/", "plain % ?#ü"])
async def test_a_project_is_bounded_by_its_name_whatever_characters_it_has(
    cats: Tenant, dogs: Tenant, name: str
) -> None:
    mine, theirs = await project(cats, name), await project(dogs, name, sessions=9)
    await as_administrator(cats)
    async with AsyncWeft(cats.service.url, cats.http.headers["X-API-Key"], retries=0) as weft:
        assert (await weft.projects.bound(name, {"sessions": 2})).id == mine
        limits = {one.id: one.limits for one in (await weft.projects.list()).projects}
    assert limits[mine] == {"sessions": 2}
    listed = (await dogs.http.get(f"{dogs.service.url}/api/weft/v1/projects")).json()["projects"]
    assert {one["id"]: one["limits"] for one in listed}[theirs] == {"sessions": 9}
