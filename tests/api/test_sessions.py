import httpx
import pytest
from tinker import types

from ledger.session_trace import session_trace
from store.tables import Session
from tenants.samplers import NewSampler, create_sampler
from tenants.sessions import end_silent_sessions

CREATE = {"tags": ["a"], "user_metadata": {"n": 1, "who": "me"}, "sdk_version": "0.38.0", "type": "create_session"}


async def _row(tenant, session_id: str) -> Session:
    async with tenant.service.database.read() as session:
        row = await session.get(Session, session_id)
        assert row is not None
        return row


async def _create(tenant) -> str:
    response = await tenant.http.post("/create_session", json=CREATE)
    return types.CreateSessionResponse.model_validate(response.raise_for_status().json()).session_id


async def _finish(tenant, session_id: str, reason: str) -> httpx.Response:
    body = {"reason": {"type": reason}, "detail": "because"}
    return await tenant.http.post(f"/sessions/{session_id}/finish", json=body)


async def test_session_is_the_callers(cats) -> None:
    row = await _row(cats, await _create(cats))
    assert (row.tenant_id, row.tags, row.sdk_version) == (cats.id, ["a"], "0.38.0")
    assert row.key_id == (await cats.http.get("/auth/apikey/me")).json()["key_id"]


@pytest.mark.parametrize("body", [{}, {"tags": None, "user_metadata": None}, {"unknown": [1, 2]}])
async def test_old_sdks_leave_fields_out(cats, body: dict) -> None:
    assert (await cats.http.post("/create_session", json=body)).status_code == 200


async def test_heartbeat_is_noted(cats, clock) -> None:
    session_id = await _create(cats)
    clock.move(minutes=5)
    response = await cats.http.post("/session_heartbeat", json={"session_id": session_id})
    assert response.json() == {"type": "session_heartbeat"}
    assert (await _row(cats, session_id)).last_seen_at == clock()


async def test_heartbeat_of_a_finished_session_is_410(cats) -> None:
    session_id = await _create(cats)
    assert (await _finish(cats, session_id, "success")).status_code == 204
    response = await cats.http.post("/session_heartbeat", json={"session_id": session_id})
    assert (response.status_code, response.json()["code"]) == (410, "session_gone")


async def test_heartbeat_of_a_silent_session_is_410(cats, clock) -> None:
    session_id = await _create(cats)
    clock.move(hours=2)
    async with cats.service.database.write() as transaction:
        await end_silent_sessions(transaction, silent_since=clock(), now=clock(), most=10)
    response = await cats.http.post("/session_heartbeat", json={"session_id": session_id})
    assert response.status_code == 410
    assert "timed_out" in response.json()["detail"]


async def test_first_finish_stays(cats) -> None:
    session_id = await _create(cats)
    assert (await _finish(cats, session_id, "errored")).status_code == 204
    assert (await _finish(cats, session_id, "success")).status_code == 204
    row = await _row(cats, session_id)
    assert (row.end_reason, row.end_detail) == ("errored", "because")


async def test_session_shows_its_runs_and_samplers(cats) -> None:
    session_id = await _create(cats)
    run_ids = [await cats.run(session=session_id, model_seq_id=i) for i in (0, 1)]
    async with cats.service.database.write() as transaction:
        sampler = await create_sampler(transaction, cats.id, NewSampler(session_id, 0, "test/tiny"), cats.service.clock)
    response = await cats.http.get(f"/sessions/{session_id}", params={"access_scope": "owned"})
    info = types.GetSessionResponse.model_validate(response.raise_for_status().json())
    assert (info.training_run_ids, info.sampler_ids) == (run_ids, [sampler])
    assert info.user_metadata == {"n": "1", "who": "me"}


async def test_a_session_s_trace_shows_its_operations_and_no_one_else_s(cats, dogs, service, clock) -> None:
    session, other = await cats.session(), await dogs.session()
    run, their = await cats.run(session=session), await dogs.run(session=other)
    await cats.operation(run, 1)
    await dogs.operation(their, 1)
    clock.move(seconds=2)
    link = (await cats.http.get(f"/sessions/{session}/trace_export")).raise_for_status().json()
    assert link["status"] == "ready"
    async with httpx.AsyncClient(timeout=40) as http:
        events = (await http.get(link["url"])).raise_for_status().json()["traceEvents"]
        names = [event["args"]["name"] for event in events if event["ph"] == "M"]
        assert names == [f"session {session}", run]
        begin, end = [event for event in events if event["ph"] != "M"]
        assert (begin["name"], begin["args"]["state"], end["ts"] - begin["ts"]) == ("optim_step", "pending", 2_000_000)
        assert (await http.get(link["url"][:-1])).status_code == 404
        assert (await dogs.http.get(f"/sessions/{session}/trace_export")).status_code == 404
        theirs = (await dogs.http.get(f"/sessions/{other}/trace_export")).json()["url"]
        await cats.http.delete("/auth/apikey/me")
        assert [(await http.get(url)).status_code for url in (link["url"], theirs)] == [404, 200]
        clock.move(minutes=65)
        assert (await http.get(theirs)).status_code == 404


async def test_a_long_display_name_is_cut(cats) -> None:
    created = await cats.http.post("/create_session", json={**CREATE, "display_name": "x" * 5000})
    shown = await cats.http.get(f"/sessions/{created.json()['session_id']}")
    assert shown.json()["display_name"] == "x" * 200


async def test_metadata_of_any_json_type_is_kept_and_shown_as_text(cats, dogs) -> None:
    """The SDK sends a run's metadata as any JSON, and reads it as text."""
    given = {"rate": 1e-4, "tags": ["a", None], "nested": {"on": True}, "who": "me", "none": None}
    body = {"session_id": await _create(cats), "model_seq_id": 0, "base_model": "test/tiny", "user_metadata": given}
    made = (await cats.http.post("/create_model", json=body)).raise_for_status().json()
    shown = types.TrainingRun.model_validate((await cats.http.get(f"/training_runs/{made['model_id']}")).json())
    wanted = {"rate": "0.0001", "tags": '["a",null]', "nested": '{"on":true}', "who": "me", "none": "null"}
    assert shown.user_metadata == wanted
    again = await cats.http.post("/create_model", json=body)
    assert again.json()["request_id"] == made["request_id"]
    refused = await cats.http.post("/create_model", json={**body, "model_seq_id": 1, "user_metadata": [1]})
    assert (refused.status_code, refused.json()["detail"].startswith("user_metadata")) == (400, True)
    assert (await dogs.http.get(f"/training_runs/{made['model_id']}")).status_code == 404


async def test_list_is_newest_first_and_paged(cats, dogs, clock) -> None:
    ids = []
    for _ in range(3):
        ids.append(await _create(cats))
        clock.move(seconds=1)
    await _create(dogs)
    assert (await cats.http.get("/sessions")).json() == {"sessions": ids[::-1]}
    assert (await cats.http.get("/sessions", params={"limit": 1, "offset": 1})).json() == {"sessions": [ids[1]]}


@pytest.mark.parametrize(("limit", "offset"), [(-1, -1), (10**30, 10**30), (0, 0)])
async def test_odd_pages_are_brought_into_range(cats, limit: int, offset: int) -> None:
    assert (await cats.http.get("/sessions", params={"limit": limit, "offset": offset})).status_code == 200


async def test_foreign_session_is_404_and_untouched(cats, dogs, clock) -> None:
    session_id = await _create(cats)
    before = await _row(cats, session_id)
    clock.move(minutes=1)
    answers = [
        await dogs.http.post("/session_heartbeat", json={"session_id": session_id}),
        await _finish(dogs, session_id, "success"),
        await dogs.http.get(f"/sessions/{session_id}"),
    ]
    assert [answer.status_code for answer in answers] == [404, 404, 404]
    after = await _row(cats, session_id)
    assert (after.last_seen_at, after.ended_at) == (before.last_seen_at, None)
    unknown = await dogs.http.get(f"/sessions/{'0' * 32}")
    assert unknown.json()["detail"].replace("0" * 32, session_id) == answers[2].json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/session_heartbeat", {}, "session_id"),
        ("/session_heartbeat", {"session_id": 3}, "session_id"),
        ("/session_heartbeat", {"session_id": "a\0b"}, "session_id"),
        ("/create_session", {"tags": "cat"}, "tags"),
        ("/create_session", {"project_id": "x" * 201}, "project_id"),
        ("/create_session", [], "body"),
    ],
)
async def test_bad_field_is_named(cats, path: str, body: object, field: str) -> None:
    response = await cats.http.post(path, json=body)
    assert (response.status_code, response.json()["code"]) == (400, "invalid_request")
    assert response.json()["detail"].startswith(field)


async def test_a_trace_of_a_long_session_reads_no_more_of_a_lane_than_it_tells(cats, dogs, service) -> None:
    session, other = await cats.session(), await dogs.session()
    run, second = await cats.run(session=session), await cats.run(session=session, model_seq_id=1)
    their = await dogs.run(session=other)
    for seq_id in range(1, 31):
        await cats.operation(run, seq_id)
        await dogs.operation(their, seq_id)
    await cats.operation(second, 1)
    # Far ahead of the others, as a number that was refused is recorded.
    await cats.operation(run, 10**9)
    async with service.database.read() as reading:
        told = await session_trace(reading, cats.id, session, most=4)
        assert [(one.lane, one.seq_id) for one in told] == [(run, 29), (run, 30), (second, 1), (run, 10**9)]
        assert len(await session_trace(reading, dogs.id, other)) == 30
        assert await session_trace(reading, dogs.id, session) == []
