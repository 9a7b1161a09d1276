"""Projects: sessions are in one, lists and searches are of one, and an unknown project is refused."""

import pytest
import pytest_asyncio
from tinker import types

from store.tables import Session
from tenants.keys import create_key
from tenants.projects import create_project
from tenants.rights import KeyRights, Role
from tenants.sessions import standing_session


@pytest_asyncio.fixture
async def archive(cats, service) -> str:
    async with service.database.write() as transaction:
        return (await create_project(transaction, cats.id, "archive", service.clock)).id


async def _session(tenant, **given: object) -> str:
    made = await tenant.http.post("/create_session", json=given)
    return made.raise_for_status().json()["session_id"]


async def _project_of(tenant, session: str) -> str:
    return (await tenant.http.get(f"/sessions/{session}")).raise_for_status().json()["project_id"]


async def test_a_session_is_in_the_project_that_it_names_by_id_or_name(cats, dogs, archive: str) -> None:
    named = [await _session(cats, project_id=text) for text in (archive, "archive", "default", cats.id)]
    assert [await _project_of(cats, session) for session in named] == [archive, archive, cats.id, cats.id]
    assert await _project_of(cats, await _session(cats)) == cats.id
    for tenant, text in ((cats, "nowhere"), (dogs, archive), (dogs, "archive"), (cats, dogs.id)):
        refused = await tenant.http.post("/create_session", json={"project_id": text})
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden"), text
        assert "weft project create" in refused.json()["detail"]
    assert (await dogs.http.get("/sessions")).json() == {"sessions": []}


async def test_runs_are_listed_by_the_current_project_of_their_session(cats, dogs, archive: str) -> None:
    session = await _session(cats, project_id="archive")
    archived, other = await cats.run(session=session), await cats.run()

    async def listed(project: str) -> list[str]:
        answer = await cats.http.get("/training_runs", params={"project_id": project})
        page = types.TrainingRunsResponse.model_validate(answer.raise_for_status().json())
        assert page.cursor.total_count == len(page.training_runs)
        return [run.training_run_id for run in page.training_runs]

    assert (await listed(archive), await listed("default")) == ([archived], [other])
    for tenant, text in ((cats, "nowhere"), (dogs, archive)):
        assert (await tenant.http.get("/training_runs", params={"project_id": text})).status_code == 403
    moved = await cats.http.put(f"/sessions/{session}/project", json={"project_id": "default"})
    assert moved.status_code == 204
    assert (await listed(archive), set(await listed("default"))) == ([], {archived, other})


async def test_a_session_moves_only_to_a_project_of_its_tenant(cats, dogs, archive: str) -> None:
    session, path = await _session(cats), "/sessions/{}/project"
    foreign = await dogs.http.put(path.format(session), json={"project_id": "default"})
    unknown = await cats.http.put(path.format(session), json={"project_id": "nowhere"})
    missing = await cats.http.put(path.format(session), json={})
    assert [one.status_code for one in (foreign, unknown, missing)] == [404, 403, 400]
    async with cats.service.database.read() as database:
        row = await database.get(Session, session)
        assert row is not None
        assert row.project is None


async def test_the_session_of_openai_clients_stays_in_its_project(cats, dogs, service, archive: str) -> None:
    mine, theirs = await _session(cats), await _session(dogs)
    async with service.database.write() as transaction:
        own = await standing_session(transaction, cats.id, "openai", service.clock)
        archived = await standing_session(transaction, cats.id, "openai", service.clock, project=archive)
    for session, project, to in ((own, cats.id, archive), (archived, archive, "default")):
        refused = await cats.http.put(f"/sessions/{session}/project", json={"project_id": to})
        assert (refused.status_code, "OpenAI" in refused.json()["detail"]) == (400, True)
        assert await _project_of(cats, session) == project
    assert (await cats.http.put(f"/sessions/{mine}/project", json={"project_id": archive})).status_code == 204
    assert (await dogs.http.put(f"/sessions/{theirs}/project", json={"project_id": "default"})).status_code == 204


async def test_a_search_finds_by_name_metadata_status_project_and_page(cats, dogs, archive: str, clock) -> None:
    nightly = await _session(cats, display_name="Nightly Run", project_id="archive", user_metadata={"who": "me"})
    clock.move(seconds=1)
    daily = await _session(cats, display_name="daily")
    clock.move(seconds=1)
    await _session(dogs, display_name="nightly of dogs")
    run = await cats.run(session=nightly)
    await cats.checkpoint(run, "one")
    await cats.http.post(f"/sessions/{daily}/finish", json={"reason": {"type": "errored"}})

    async def found(tenant=cats, **query: object) -> list[str]:
        asked = types.SessionSearchRequest.model_validate(query)
        answer = await tenant.http.post("/sessions/search", json=asked.model_dump(mode="json"))
        page = types.SessionSearchResponse.model_validate(answer.raise_for_status().json())
        return [one.session_id for one in page.sessions]

    assert await found() == [daily, nightly]
    assert await found(display_name="run NIGHT") == [nightly]
    assert await found(display_name="nothing", session_id=daily) == [daily]
    assert await found(user_metadata={"who": "me"}) == [nightly]
    assert await found(user_metadata={"who": "you"}) == []
    assert await found(project_ids=["archive"]) == [nightly]
    assert await found(project_ids=[cats.id]) == [daily]
    assert await found(statuses=[{"type": "active"}]) == [nightly]
    assert await found(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == [daily]
    assert await found(statuses=[{"type": "failed"}]) == []
    me = "tml:key:" + (await cats.http.get("/auth/apikey/me")).json()["name"]
    assert await found(owner={"type": "user", "owner_urns": [me]}) == [daily, nightly]
    assert await found(owner={"type": "user", "owner_urns": ["tml:key:other"]}) == []
    assert await found(dogs, session_id=nightly) == []
    first = (await cats.http.post("/sessions/search", json={"limit": 1})).json()
    second = (await cats.http.post("/sessions/search", json={"limit": 1, "cursor": first["next_cursor"]})).json()
    assert [one["session_id"] for one in first["sessions"] + second["sessions"]] == [daily, nightly]
    assert second["next_cursor"] is None
    (summary,) = types.SessionSearchResponse.model_validate(second).sessions
    assert (summary.owner, summary.project_id, summary.checkpoints_count) == (me, archive, 1)
    assert summary.checkpoint_storage_bytes == 7
    refused = await dogs.http.post("/sessions/search", json={"project_ids": [archive]})
    assert refused.status_code == 403


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 201}, {"statuses": []}, {"user_metadata": {'a"b': "c"}}, {"cursor": {}}]
)
async def test_a_search_that_makes_no_sense_is_400(cats, query: dict) -> None:
    assert (await cats.http.post("/sessions/search", json=query)).status_code == 400


async def test_projects_are_made_once_and_listed(cats, dogs, service) -> None:
    async with service.database.write() as transaction:
        rights = KeyRights(role=Role.ADMIN)
        key = await create_key(transaction, tenant=cats.id, note="", clock=service.clock, rights=rights)
    headers, url = {"X-API-Key": key.secret}, f"{service.url}/api/weft/v1/projects"
    made = [(await cats.http.post(url, headers=headers, json={"name": "rl"})).json() for _ in range(2)]
    assert made[0] == made[1]
    listed = (await cats.http.get(url)).json()["projects"]
    assert [(one["id"], one["name"]) for one in listed] == [(cats.id, "default"), (made[0]["id"], "rl")]
    assert [one["name"] for one in (await dogs.http.get(url)).json()["projects"]] == ["default"]
    for name in ("", "default", "proj-x", cats.id, "a\nb", "x" * 101):
        assert (await cats.http.post(url, headers=headers, json={"name": name})).status_code == 400, name
