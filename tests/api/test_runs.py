from urllib.parse import quote

import pytest
from sqlalchemy import event, update
from tinker import types

from contracts.paths import Segment
from store.tables import Run, RunState


async def _get(tenant, run: str) -> types.TrainingRun:
    response = await tenant.http.get(f"/training_runs/{run}", params={"access_scope": "owned"})
    return types.TrainingRun.model_validate(response.raise_for_status().json())


async def test_run_shows_what_it_is(cats, clock) -> None:
    run_id = await cats.run()
    run = await _get(cats, run_id)
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (run_id, "test/tiny", True, 8)
    assert (run.model_owner, run.corrupted, run.user_metadata) == ("cats", False, {"colour": "black"})
    assert run.last_request_time == clock()
    assert run.last_request_time.tzinfo is not None
    assert (run.last_checkpoint, run.last_sampler_checkpoint) == (None, None)


async def test_run_is_found_by_encoded_and_plain_id(cats) -> None:
    run_id = await cats.run()
    assert ":" in run_id
    assert await _get(cats, quote(run_id, safe="")) == await _get(cats, run_id)


async def test_last_checkpoints_are_the_newest_listed_unexpired(cats, clock) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "first")
    clock.move(seconds=1)
    await cats.checkpoint(run, "second")
    await cats.checkpoint(run, "sampler", segment=Segment.SAMPLER_WEIGHTS)
    clock.move(seconds=1)
    await cats.checkpoint(run, "brief", ttl_seconds=60)
    await cats.checkpoint(run, "nameless", segment=Segment.SAMPLER_WEIGHTS, listed=False)
    shown = await _get(cats, run)
    assert shown.last_checkpoint is not None
    assert shown.last_sampler_checkpoint is not None
    assert shown.last_checkpoint.checkpoint_id == "weights/brief"
    assert shown.last_sampler_checkpoint.checkpoint_id == "sampler_weights/sampler"
    clock.move(minutes=2)
    shown = await _get(cats, run)
    assert shown.last_checkpoint is not None
    assert shown.last_checkpoint.checkpoint_id == "weights/second"


async def test_list_is_newest_first_with_a_cursor(cats, dogs, clock) -> None:
    ids = []
    for _ in range(3):
        ids.append(await cats.run())
        clock.move(seconds=1)
    await dogs.run()
    response = await cats.http.get("/training_runs", params={"limit": 2, "offset": 1, "access_scope": "owned"})
    page = types.TrainingRunsResponse.model_validate(response.raise_for_status().json())
    assert [run.training_run_id for run in page.training_runs] == [ids[1], ids[0]]
    assert page.cursor == types.Cursor(offset=1, limit=2, total_count=3)


async def test_list_needs_as_many_queries_for_ten_runs_as_for_one(cats, service) -> None:
    statements: list[str] = []

    def note(_conn, _cursor, statement: str, *_rest: object) -> None:
        statements.append(statement)

    for engine in service.engines:
        event.listen(engine, "before_cursor_execute", note)
    counts = []
    for new_runs in (1, 9):
        for _ in range(new_runs):
            await cats.checkpoint(await cats.run(), "x")
        statements.clear()
        assert (await cats.http.get("/training_runs")).status_code == 200
        counts.append(len(statements))
    assert counts[0] == counts[1] > 3


async def test_run_whose_creation_failed_is_corrupted(cats, service) -> None:
    run = await cats.run()
    async with service.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.FAILED))
    assert (await _get(cats, run)).corrupted


async def test_foreign_and_unknown_runs_are_the_same_404(cats, dogs) -> None:
    run = await cats.run()
    foreign = await dogs.http.get(f"/training_runs/{run}")
    unknown = await dogs.http.get("/training_runs/nothing")
    assert (foreign.status_code, unknown.status_code) == (404, 404)
    assert foreign.json()["detail"].replace(run, "nothing") == unknown.json()["detail"]
    assert (await dogs.http.get("/training_runs")).json()["training_runs"] == []


@pytest.mark.parametrize("path", ["/training_runs/a%00b", "/training_runs/..%2f..", "/training_runs/%ff"])
async def test_odd_ids_are_refused_quietly(cats, path: str) -> None:
    response = await cats.http.get(path)
    assert response.status_code in (400, 404)
    assert response.json()["code"] in ("invalid_request", "not_found", "not_implemented")


async def test_limit_that_is_no_number_is_named(cats) -> None:
    response = await cats.http.get("/training_runs", params={"limit": "many"})
    assert (response.status_code, response.json()["code"]) == (400, "invalid_request")
    assert "limit" in response.json()["detail"]
