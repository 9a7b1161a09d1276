"""Copies and publications over HTTP: repeats, places that are taken, keys with bounds, and nothing of another tenant."""

import asyncio
import os
import threading
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from contracts.paths import Segment
from store.copied_folder import copy_folder
from store.tables import CheckpointHold, Operation
from tenants.keys import create_key
from tenants.projects import create_project
from tenants.rights import KeyRights, Role

PATH = "tinker://{}/weights/one"


async def copy(tenant, body: dict, *, key: str | None = None, token: str | None = None) -> httpx.Response:
    headers = {
        name: value for name, value in (("X-Idempotency-Key", key), ("X-Tinker-Weights-Access-Token", token)) if value
    }
    return await tenant.http.post("/copy_weights", json=body, headers=headers)


@pytest.mark.parametrize("name", ["publish", "ttl", "archive", "external_weights_urls"])
async def test_a_checkpoint_with_a_routes_name_is_deleted(cats, dogs, name: str) -> None:
    mine, theirs = await cats.run(), await dogs.run()
    for tenant, run in ((cats, mine), (dogs, theirs)):
        await tenant.checkpoint(run, name)
    deleted = await cats.http.delete(f"/training_runs/{mine}/checkpoints/weights/{name}")
    assert deleted.status_code == 204, deleted.text
    listed = [(await tenant.http.get("/checkpoints")).json()["checkpoints"] for tenant in (cats, dogs)]
    assert [len(one) for one in listed] == [0, 1]


async def publish(tenant, run: str, *, taken_back: bool = False) -> None:
    method = "DELETE" if taken_back else "POST"
    answer = await tenant.http.request(method, f"/training_runs/{run}/checkpoints/weights/one/publish")
    assert answer.status_code == 204


def folders(tenant) -> set[str]:
    root = tenant.service.services.runtime.data_folder.path("checkpoints")
    return {one.name for one in root.iterdir()} if root.exists() else set()


@pytest.mark.parametrize("is_slot", [True, False])
async def test_a_repeat_finds_the_first_copy_whatever_has_become_of_the_source(cats, dogs, is_slot: bool) -> None:
    run = await cats.run()
    source = await cats.checkpoint(run, "one")
    os.utime(source, (1e9, 1e9))
    await publish(cats, run)
    place = {"session_id": await dogs.session(), "model_seq_id": 4} if is_slot else {}
    asked = {"source_path": PATH.format(run), **place}
    first = await copy(dogs, asked, key="once")
    path = first.json()["tinker_path"]
    assert path.endswith(":train:4/weights/one" if is_slot else ":train:0/weights/one")
    await publish(cats, run, taken_back=True)
    await cats.http.delete(f"/training_runs/{run}/checkpoints/weights/one")
    held = folders(dogs)
    assert (await copy(dogs, asked, key="once")).json() == first.json()
    assert folders(dogs) == held
    assert (await copy(dogs, asked | {"model_seq_id": 5} if is_slot else asked, key="other")).status_code == 404
    assert folders(dogs) == held
    (listed,) = (await dogs.http.get("/checkpoints")).json()["checkpoints"]
    assert (listed["tinker_path"], listed["user_metadata"]) == (path, None)


async def test_a_place_with_anything_else_is_refused_and_keeps_what_it_has(cats, dogs) -> None:
    run, other = await cats.run(), await cats.run()
    for one in (run, other):
        await cats.checkpoint(one, "one")
    session = await cats.session()
    own = await cats.run(session=session)
    await cats.checkpoint(own, "one")
    slot = {"session_id": session, "model_seq_id": int(own.rpartition(":")[2])}
    assert (await copy(cats, {"source_path": PATH.format(run), **slot})).status_code == 400
    assert (await copy(cats, {"source_path": PATH.format(run)}, key="k")).status_code == 200
    held = folders(cats)
    assert (await copy(cats, {"source_path": PATH.format(other)}, key="k")).status_code == 400
    assert folders(cats) == held
    described = (await cats.http.get(f"/training_runs/{own}")).json()
    assert described["training_run_id"] == own


async def test_a_session_of_another_tenant_is_not_found_whatever_its_slots_have(cats, dogs) -> None:
    run, session = await dogs.run(), await cats.session()
    await cats.run(session=session)
    await dogs.checkpoint(run, "one")
    held = folders(dogs)
    for slot in (0, 1):
        asked = {"source_path": PATH.format(run), "session_id": session, "model_seq_id": slot}
        assert (await copy(dogs, asked)).status_code == 404
    assert folders(dogs) == held


async def test_a_publication_that_is_taken_back_while_the_files_are_copied_gives_no_copy(
    cats, dogs, monkeypatch
) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "one")
    await publish(cats, run)
    held, loop = folders(dogs), asyncio.get_running_loop()

    def taken_back_meanwhile(source: Path, target: Path) -> None:
        copy_folder(source, target)
        asyncio.run_coroutine_threadsafe(publish(cats, run, taken_back=True), loop).result(timeout=30)

    monkeypatch.setattr("api.tinker.sharing.copy_folder", taken_back_meanwhile)
    asked = {"source_path": PATH.format(run)}
    assert (await copy(dogs, asked)).status_code == 404
    assert folders(dogs) == held
    assert (await dogs.http.get("/checkpoints")).json()["checkpoints"] == []
    assert (await copy(dogs, asked, token=cats.key)).status_code == 200


async def test_a_copy_of_files_that_cannot_be_seen_is_none_and_made_once_they_can_be(cats, dogs) -> None:
    """The source's folder is away. Its owner's other checkpoint is copied meanwhile."""
    run, other = await cats.run(), await cats.run()
    folder = await cats.checkpoint(run, "one")
    await cats.checkpoint(other, "one")
    for source in (run, other):
        await publish(cats, source)
    away = folder.rename(folder.with_name("away"))
    asked = {"source_path": PATH.format(run)}
    refused = await copy(dogs, asked, key="k")
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert (await copy(dogs, {"source_path": PATH.format(other)})).status_code == 200
    assert len((await dogs.http.get("/checkpoints")).json()["checkpoints"]) == 1
    away.rename(folder)
    assert (await copy(dogs, asked, key="k")).status_code == 200


async def test_a_key_of_a_project_loads_from_that_project_and_what_is_published_alone(cats, dogs) -> None:
    """The operation of a refused load is failed, and nothing is held for it: its turn looks up no path."""
    async with cats.service.database.write() as transaction:
        project = (await create_project(transaction, cats.id, "apart", cats.service.clock)).id
        rights = KeyRights(projects=frozenset({project}))
        key = await create_key(transaction, tenant=cats.id, note="", clock=cats.service.clock, rights=rights)
    elsewhere, theirs = await cats.run(), await dogs.run()
    for tenant, run in ((cats, elsewhere), (dogs, theirs)):
        await tenant.checkpoint(run, "one")
    async with httpx.AsyncClient(base_url=cats.http.base_url, headers={"X-API-Key": key.secret}) as http:
        session = (await http.post("/create_session", json={})).json()["session_id"]
        run = await cats.run(session=session)
        own = await cats.run(session=session, model_seq_id=1)
        await cats.checkpoint(own, "one")

        async def load(number: int, source: str) -> str | None:
            body = {"model_id": run, "seq_id": number, "path": PATH.format(source), "optimizer": False}
            operation = (await http.post("/load_weights", json=body)).json()["request_id"]
            assert (await http.post("/load_weights", json=body)).json()["request_id"] == operation
            async with cats.service.database.read() as session:
                failed = await session.scalar(select(Operation.error_code).where(Operation.id == operation))
                held = await session.scalar(
                    select(CheckpointHold.checkpoint_id).where(CheckpointHold.operation_id == operation)
                )
            assert (failed is None) == (held is not None)
            return failed

        assert [await load(1, elsewhere), await load(2, theirs)] == ["not_found"] * 2
        await publish(cats, elsewhere)
        await publish(dogs, theirs)
        assert [await load(number, source) for number, source in ((3, elsewhere), (4, theirs), (5, own))] == [None] * 3
        await publish(dogs, theirs, taken_back=True)
        assert await load(6, theirs) == "not_found"


async def test_the_session_of_a_copy_is_found_by_the_key_that_made_the_copy(cats, dogs) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "one")
    await publish(cats, run)
    for tenant in (cats, dogs):
        path = (await copy(tenant, {"source_path": PATH.format(run)})).json()["tinker_path"]
        me = "tml:key:" + (await tenant.http.get("/auth/apikey/me")).json()["name"]
        asked = {"owner": {"type": "user", "owner_urns": [me]}}
        found = (await tenant.http.post("/sessions/search", json=asked)).json()["sessions"]
        assert [(one["session_id"], one["owner"]) for one in found] == [(path[9:].partition(":")[0], me)]


async def test_a_copys_folder_is_as_young_as_the_copy_and_shares_its_files(cats, clock) -> None:
    run = await cats.run()
    source = await cats.checkpoint(run, "one", segment=Segment.SAMPLER_WEIGHTS)
    os.utime(source, (1e9, 1e9))
    before = folders(cats)
    answer = await copy(cats, {"source_path": f"tinker://{run}/sampler_weights/one"})
    assert answer.status_code == 200, answer.text
    (made,) = folders(cats) - before
    check_folder(source.parent / made, source)


def check_folder(made: Path, source: Path) -> None:
    """Check that the copy is young, although its source is old, and holds the source's own files."""
    assert made.stat().st_mtime > 1.5e9
    assert (made / "adapter_model.safetensors").samefile(source / "adapter_model.safetensors")


async def test_a_token_is_bound_as_its_key_is(cats, dogs) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "one")
    async with cats.service.database.write() as transaction:
        project = (await create_project(transaction, cats.id, "elsewhere", cats.service.clock)).id
        bounds = [
            KeyRights(role=Role.VIEWER),
            KeyRights(projects=frozenset({project})),
            KeyRights(base_models=frozenset({"another"})),
            KeyRights(networks=("203.0.113.0/24",)),
            KeyRights(expires_at=cats.service.clock() + timedelta(hours=1)),
            KeyRights(),
        ]
        keys = [
            await create_key(transaction, tenant=cats.id, note="", clock=cats.service.clock, rights=rights)
            for rights in bounds
        ]
    *refused, ending, free = keys
    asked = {"source_path": PATH.format(run)}
    for key in refused:
        assert (await copy(dogs, asked, token=key.secret)).status_code == 403
    assert (await copy(dogs, asked, token=ending.secret)).status_code == 200
    cats.service.clock.move(hours=1)
    assert (await copy(dogs, asked, token=ending.secret)).status_code == 403
    assert (await copy(dogs, asked, token=free.secret)).status_code == 200


@pytest.mark.parametrize(
    "more",
    [
        {"source_path": "no path"},
        {"source_path": "tinker://x/weights/one", "session_id": "s"},
        {"source_path": "tinker://x/weights/one", "model_seq_id": 1},
        {"source_path": "tinker://x/weights/one", "ttl_seconds": 0},
        {},
    ],
)
async def test_a_copy_that_is_none_is_400(cats, more: dict) -> None:
    assert (await copy(cats, more)).status_code == 400


async def test_a_load_with_a_bad_path_uses_up_its_number(cats) -> None:
    run = await cats.run()
    for number, bad in enumerate((5, ["x"], None, "no path"), start=1):
        body = {"model_id": run, "seq_id": number, "path": bad, "optimizer": False, "weights_access_token": "tml-x"}
        answer = await cats.http.post("/load_weights", json=body)
        assert answer.status_code == 200, answer.text
        assert "request_id" in answer.json()


async def test_copies_of_a_tenant_are_made_one_after_the_other_and_a_neighbours_go_on(
    cats, dogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a first copy take long to copy. The tenant's room is looked at once its turn has come."""
    runs = {}
    for tenant in (cats, dogs):
        runs[tenant.id] = await tenant.run()
        await tenant.checkpoint(runs[tenant.id], "one")
    began, goes_on = asyncio.Event(), threading.Event()
    loop, copied = asyncio.get_running_loop(), []

    def slow(source: Path, target: Path) -> None:
        copied.append(target)
        if len(copied) == 1:
            loop.call_soon_threadsafe(began.set)
            assert goes_on.wait(60)
        copy_folder(source, target)

    monkeypatch.setattr("api.tinker.sharing.copy_folder", slow)
    monkeypatch.setattr("api.tinker.sharing.PATIENCE_SECONDS", 0.2)
    first = asyncio.create_task(copy(cats, {"source_path": PATH.format(runs[cats.id])}, key="first"))
    try:
        async with asyncio.timeout(60):
            await began.wait()
            second = await copy(cats, {"source_path": PATH.format(runs[cats.id])}, key="second")
            neighbours = await copy(dogs, {"source_path": PATH.format(runs[dogs.id])}, key="theirs")
        assert (second.status_code, second.json()["code"]) == (429, "too_many_requests")
        assert neighbours.status_code == 200
        assert len(copied) == 2, "the refused one has copied nothing"
    finally:
        goes_on.set()
        made = await first
    assert made.status_code == 200
    assert (await copy(cats, {"source_path": PATH.format(runs[cats.id])}, key="second")).status_code == 200
