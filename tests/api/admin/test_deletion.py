"""A tenant's deletion: it can be taken back until the grace time is over; then all it has goes, and nothing of another's."""

import hashlib
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from contracts.ids import TenantId
from contracts.operations import OptimStepped
from contracts.weight_jobs import JobKind, JobState
from store.tables import RunPoint, WeightJob
from tenants.weight_jobs import new_job_id, parts_folder
from tests.api.admin.conftest import Admin
from tests.api.conftest import Tenant
from tests.workers.presence import be_present
from workers.housekeeping import tenant_removal
from workers.housekeeping.housekeeping import Housekeeping
from workers.housekeeping.tenant_removal import remove_part

GRACE = 600


def hash_of(folder: Path) -> str:
    """A digest of all files below a folder, with their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


async def keep_house(admin: Admin, hours: int) -> None:
    """Let hours pass in which all of housekeeping runs."""
    house = Housekeeping(admin.service.services.runtime, lambda: True)
    for _ in range(hours + 1):
        await be_present(admin.service.services.runtime)
        outcomes = await house.sweep(until_done=True)
        assert not [one for one in outcomes.values() if isinstance(one, BaseException)], outcomes
        admin.service.clock.move(hours=1)


async def worked(tenant: Tenant) -> tuple[str, Path]:
    """A run with a checkpoint, a done operation, a pending one and a pending job."""
    run = await tenant.run()
    folder = await tenant.checkpoint(run, "final")
    await tenant.operation(run)
    await tenant.service.run_next(OptimStepped({}))
    await tenant.operation(run, 2)
    await job(tenant)
    return run, folder


async def job(tenant: Tenant, state: JobState = JobState.PENDING, kind: JobKind = JobKind.MERGE, **given: Any) -> str:
    """A job on weights in that state, with files of its newest attempt and of one that died, and an import's archive."""
    now, id, data = tenant.service.clock(), new_job_id(), tenant.service.services.runtime.data_folder
    made = {"id": id, "checkpoint_id": new_job_id(), "created_at": now, "base_model": "test/tiny", "body": b""} | given
    async with tenant.service.database.write() as transaction:
        transaction.add(WeightJob(tenant_id=tenant.id, state=state, kind=kind, **made))
    if state is not JobState.DONE:
        for name in (made["checkpoint_id"], f".{made['checkpoint_id']}.died"):
            data.path(f"checkpoints/{name}").mkdir(parents=True)
    if kind is JobKind.IMPORT:
        data.path(f"imports/{id}").mkdir(parents=True)
    return id


def folders(admin: Admin) -> set[str]:
    return {str(path) for parent in ("checkpoints", "imports") for path in (admin.data / parent).glob("*")}


async def jobs(tenant: Tenant) -> dict[str, bool]:
    """The tenant's jobs, and whether each is to end."""
    found = select(WeightJob.id, WeightJob.cancelled_at).where(WeightJob.tenant_id == tenant.id)
    async with tenant.service.database.read() as session:
        return {id: cancelled is not None for id, cancelled in await session.execute(found)}


async def mark(admin: Admin, tenant: Tenant, **given: object) -> dict[str, Any]:
    answer = await admin.http.put(f"/tenants/{tenant.id}/deletion", json={"grace_seconds": GRACE, **given})
    marked: dict[str, Any] = answer.raise_for_status().json()
    return marked


@pytest.mark.parametrize("mode", ["blocked", "read_only"])
async def test_a_marked_tenant_is_refused_and_can_be_restored(
    admin: Admin, cats: Tenant, dogs: Tenant, mode: str
) -> None:
    run, folder = await worked(cats)
    marked = await mark(admin, cats, mode=mode, reason="moved away")
    assert (marked["checkpoints"], marked["stored_bytes"]) == (1, 7)
    listed = await cats.http.get(f"/training_runs/{run}/checkpoints")
    assert listed.status_code == (403 if mode == "blocked" else 200)
    assert "moved away" in marked["suspension"]["reason"]
    assert (await dogs.http.post("/create_session", json={})).status_code == 200
    await Housekeeping(admin.service.services.runtime, lambda: True).sweep(until_done=True)
    restored = (await admin.http.delete(f"/tenants/{cats.id}/deletion")).raise_for_status().json()
    assert (restored["suspension"], restored["delete_at"]) == (None, None)
    assert (await cats.http.get(f"/training_runs/{run}/checkpoints")).status_code == 200
    assert folder.exists()
    again = await admin.http.delete(f"/tenants/{cats.id}/deletion")
    assert (again.status_code, again.json()["code"]) == (400, "invalid_request")


async def test_a_deleted_tenant_leaves_usage_only_and_its_neighbour_as_it_was(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    beside, kept = await worked(dogs)
    run, folder = await worked(cats)
    hashed = hash_of(kept)
    await keep_house(admin, 0)
    usage = (await admin.http.get("/usage", params={"days": 3000, "tenant": "cats"})).json()["items"]
    assert [one["operations"] for one in usage] == [1]
    await mark(admin, cats)
    admin.service.clock.move(seconds=GRACE - 1)
    await Housekeeping(admin.service.services.runtime, lambda: True).sweep(until_done=True)
    assert (await cats.http.get("/sessions")).status_code == 403
    admin.service.clock.move(seconds=1)
    assert (await admin.http.delete(f"/tenants/{cats.id}/deletion")).status_code == 400
    await Housekeeping(admin.service.services.runtime, lambda: True).sweep(until_done=True)
    assert (await cats.http.get("/sessions")).status_code == 401
    shown = (await admin.http.get(f"/tenants/{cats.id}")).json()
    # Files go before texts: some are left for as long as results can be retrieved.
    assert (shown["name"], shown["deleted_at"]) == ("cats", None)
    await keep_house(admin, 4)
    shown = (await admin.http.get(f"/tenants/{cats.id}")).json()
    assert (shown["name"], shown["deleted_at"] is None) == (f"deleted-{cats.id}", False)
    assert not folder.exists()
    copy = admin.data / "copy.db"
    with closing(sqlite3.connect(admin.data / "weft.db")) as database:
        # Without what SQLite keeps of deleted rows until it needs the room.
        database.execute("VACUUM INTO ?", (str(copy),))
    assert b"cats" not in copy.read_bytes()
    after = (await admin.http.get("/usage", params={"days": 3000, "tenant": shown["name"]})).json()["items"]
    assert [(one["operations"], one["tokens"]) for one in after] == [
        (one["operations"], one["tokens"]) for one in usage
    ]
    assert hash_of(kept) == hashed
    assert (await dogs.http.get(f"/training_runs/{beside}/checkpoints")).status_code == 200
    assert (await admin.http.post("/tenants", json={"name": "cats"})).status_code == 201
    assert (await admin.http.get(f"/runs/{run}")).json()["state"] == "unloaded"


async def test_a_deleted_tenants_jobs_end_with_their_files_and_no_others_do(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    """A job in a living worker's hands ends by that worker, which learns of it when it renews its lease."""
    runtime, begun = admin.service.services.runtime, admin.service.clock()
    before = begun - timedelta(hours=1)
    for one in (dogs, cats):
        await job(one, kind=JobKind.IMPORT)
        await job(one, JobState.RUNNING, taken_by="a", taken_until=before)
        await job(one, JobState.DONE, finished_at=before)
        await job(one, JobState.FAILED, finished_at=before)
        if one is dogs:
            theirs, their_folders = await jobs(dogs), folders(admin)
    held = await job(cats, JobState.RUNNING, taken_by="b", taken_until=begun + timedelta(days=1))
    await mark(admin, cats, grace_seconds=0)
    await remove_part(runtime, TenantId(cats.id))
    assert await jobs(cats) == {held: True}
    await keep_house(admin, 3)
    assert not (await admin.http.get(f"/tenants/{cats.id}")).json()["deleted_at"]
    async with admin.service.database.write() as transaction:
        ended = {"state": JobState.CANCELLED, "taken_until": None, "finished_at": admin.service.clock()}
        await transaction.execute(update(WeightJob).where(WeightJob.id == held).values(ended))
    await keep_house(admin, 2)
    assert (await admin.http.get(f"/tenants/{cats.id}")).json()["deleted_at"]
    assert (await jobs(dogs), folders(admin)) == (theirs, their_folders)
    assert list(theirs.values()) == [False] * 4


async def test_a_deleted_tenant_that_has_something_all_the_same_is_removed_once_more(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    """A request that an older version let in late has recorded an import; a part of an upload goes with the first removal."""
    data = admin.service.services.runtime.data_folder
    for tenant in (cats, dogs):
        data.path(parts_folder(tenant.id)).mkdir(parents=True)
    await mark(admin, cats, grace_seconds=0)
    await keep_house(admin, 3)
    assert (await admin.http.get(f"/tenants/{cats.id}")).json()["deleted_at"]
    assert [data.path(parts_folder(one.id)).exists() for one in (cats, dogs)] == [False, True]
    theirs = folders(admin)
    await job(cats, kind=JobKind.IMPORT)
    await keep_house(admin, 3)
    assert (await admin.http.get(f"/tenants/{cats.id}")).json()["deleted_at"]
    assert (await jobs(cats), folders(admin)) == ({}, theirs)


async def test_a_deletion_that_was_taken_back_after_it_was_seen_is_not_carried_out(admin: Admin, cats: Tenant) -> None:
    run, _ = await worked(cats)
    await mark(admin, cats)
    (await admin.http.delete(f"/tenants/{cats.id}/deletion")).raise_for_status()
    admin.service.clock.move(seconds=GRACE + 1)
    assert await remove_part(admin.service.services.runtime, TenantId(cats.id)) == 0
    assert (await cats.http.get(f"/training_runs/{run}/checkpoints")).status_code == 200


async def test_a_restored_tenant_is_suspended_as_it_was_before(admin: Admin, cats: Tenant) -> None:
    path = f"/tenants/{cats.id}/suspension"
    before = (await admin.http.put(path, json={"mode": "read_only", "reason": "unpaid"})).raise_for_status().json()
    await mark(admin, cats, reason="moved away")
    await mark(admin, cats, reason="moved away for good")
    restored = (await admin.http.delete(f"/tenants/{cats.id}/deletion")).raise_for_status().json()
    assert restored["suspension"] == before["suspension"]
    assert (await admin.http.delete(path)).raise_for_status().json()["suspension"] is None


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_tenant_that_is_to_be_deleted_is_not_resumed_and_gets_no_key(
    admin: Admin, cats: Tenant, dogs: Tenant, is_gone: bool
) -> None:
    await mark(admin, cats, mode="read_only")
    if is_gone:
        await keep_house(admin, 4)
        assert (await admin.http.get(f"/tenants/{cats.id}")).json()["deleted_at"]
    (key,) = (await admin.http.get("/keys", params={"tenant_id": cats.id})).json()["items"]
    refused = [
        await admin.http.delete(f"/tenants/{cats.id}/suspension"),
        await admin.http.put(f"/tenants/{cats.id}/suspension", json={"mode": "hold"}),
        await admin.http.post(f"/tenants/{cats.id}/keys", json={"role": "admin"}),
        await admin.http.post(f"/keys/{key['key_id']}/rotation", json={}),
    ]
    assert [(one.status_code, one.json()["code"]) for one in refused] == [(400, "invalid_request")] * 4
    if not is_gone:
        assert all("restore it first" in one.json()["detail"] for one in refused)
    assert (await admin.http.post(f"/tenants/{dogs.id}/keys", json={"role": "admin"})).status_code == 201


async def test_a_removal_that_fails_holds_up_no_other_tenants(
    admin: Admin, cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted([cats, dogs], key=lambda one: one.id)
    for one in (first, second):
        await mark(admin, one, grace_seconds=0)
    remove = tenant_removal.remove_part

    async def fails_for_the_first(runtime: Any, tenant: TenantId) -> int:
        if tenant == first.id:
            raise ValueError("a row that nobody expected")
        return await remove(runtime, tenant)

    monkeypatch.setattr(tenant_removal, "remove_part", fails_for_the_first)
    await keep_house(admin, 2)
    assert (await admin.http.get(f"/tenants/{second.id}")).json()["deleted_at"]
    assert not (await admin.http.get(f"/tenants/{first.id}")).json()["deleted_at"]


async def test_many_rows_of_a_tenant_go_in_bounded_batches(
    admin: Admin, cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_removal, "LARGE", 3)
    of_cats, of_dogs = await cats.run(), await dogs.run()
    points = [point(run, tenant, step) for run, tenant in ((of_cats, cats), (of_dogs, dogs)) for step in range(1, 11)]
    async with admin.service.database.write() as transaction:
        transaction.add_all(points)
    await mark(admin, cats, grace_seconds=0)
    await keep_house(admin, 3)
    left = select(RunPoint.run_id, func.count()).group_by(RunPoint.run_id)
    async with admin.service.database.read() as session:
        assert [tuple(row) for row in await session.execute(left)] == [(of_dogs, 10)]
    assert (await admin.http.get(f"/tenants/{cats.id}")).json()["deleted_at"]


def point(run: str, tenant: Tenant, step: int) -> RunPoint:
    return RunPoint(
        run_id=run, tenant_id=tenant.id, step=step, loss_weight=1.0, loss_per="token", tokens=1, sampled_tokens=0
    )
