"""A suspended tenant's polls say why its work waits; a second tenant's do not."""

from datetime import timedelta

import pytest

from contracts.operations import OptimStepped
from store.settings import Settings
from tenants.rights import SuspendMode
from tenants.suspensions import resume_tenant, suspend_tenant
from tests.api.conftest import BASE


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"poll_hold": timedelta(milliseconds=50)})


async def test_a_poll_tells_the_operators_reason_until_the_resume(cats, dogs) -> None:
    held, other = [await tenant.operation(await tenant.run()) for tenant in (cats, dogs)]
    async with cats.service.database.write() as transaction:
        await suspend_tenant(transaction, name="cats", reason="unpaid", now=cats.service.clock())
    answer = await cats.http.post("/retrieve_future", json={"request_id": held})
    assert (answer.status_code, answer.json()["queue_state"]) == (408, "paused_capacity")
    assert "unpaid" in answer.json()["queue_state_reason"]
    beside = (await dogs.http.post("/retrieve_future", json={"request_id": other})).json()
    assert "no trainer" in beside["queue_state_reason"]
    async with cats.service.database.write() as transaction:
        await resume_tenant(transaction, name="cats", now=cats.service.clock())
    resumed = (await cats.http.post("/retrieve_future", json={"request_id": held})).json()
    assert "no trainer" in resumed["queue_state_reason"]


async def _suspend(tenant, mode: SuspendMode) -> None:
    async with tenant.service.database.write() as transaction:
        now = tenant.service.clock()
        await suspend_tenant(transaction, name="cats", reason="unpaid", now=now, mode=mode)


async def test_read_only_takes_no_new_work_and_delivers_what_is_done(cats, dogs) -> None:
    run, other = await cats.run(), await dogs.run()
    await cats.checkpoint(run, "one")
    done = await cats.operation(run, 1)
    await cats.service.run_next(OptimStepped({"x": 1.0}))
    await _suspend(cats, SuspendMode.READ_ONLY)
    polled = await cats.http.post("/retrieve_future", json={"request_id": done})
    assert (polled.status_code, polled.json()["metrics"]) == (200, {"x": 1.0})
    body = {"model_id": run, "seq_id": 2}
    step = await cats.http.post("/optim_step", json=body)
    failed = (await cats.http.post("/retrieve_future", json={"request_id": step.json()["request_id"]})).json()
    assert (failed["category"], "read-only" in failed["error"], "unpaid" in failed["error"]) == ("user", True, True)
    session = await cats.session()
    created = {"session_id": session, "model_seq_id": 7, "base_model": BASE}
    sampler = {"session_id": session, "sampling_session_seq_id": 7, "base_model": BASE}
    for path, asked in (("/create_model", created), ("/create_sampling_session", sampler)):
        refused = await cats.http.post(path, json=asked)
        assert (refused.status_code, refused.json()["code"]) == (403, "suspended"), path
    for path in (
        "/training_runs",
        "/checkpoints",
        "/sessions",
        f"/training_runs/{run}/checkpoints/weights/one/archive",
    ):
        assert (await cats.http.get(path)).status_code in (200, 302), path
    assert (await cats.http.delete(f"/training_runs/{run}/checkpoints/weights/one")).status_code == 204
    assert (await dogs.http.post("/optim_step", json={"model_id": other, "seq_id": 1})).status_code == 200
    async with cats.service.database.write() as transaction:
        await resume_tenant(transaction, name="cats", now=cats.service.clock())
    # The refused step has used up its number: the next one runs.
    step = await cats.http.post("/optim_step", json={"model_id": run, "seq_id": 3})
    await cats.service.run_next(OptimStepped({}))
    polled = await cats.http.post("/retrieve_future", json={"request_id": step.json()["request_id"]})
    assert (polled.status_code, polled.json()) == (200, {"metrics": {}})


async def test_read_only_answers_a_repeat_of_accepted_work_with_its_first_id(cats) -> None:
    run = await cats.run()
    body = {"model_id": run, "seq_id": 1}
    first = (await cats.http.post("/optim_step", json=body)).json()
    await _suspend(cats, SuspendMode.READ_ONLY)
    assert (await cats.http.post("/optim_step", json=body)).json() == first


async def test_blocked_refuses_every_request_and_link_and_loses_nothing(cats, dogs) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "one")
    waiting = await cats.operation(run, 1)
    link = (await cats.http.get(f"/training_runs/{run}/checkpoints/weights/one/archive")).headers["location"]
    await _suspend(cats, SuspendMode.BLOCKED)
    for method, path in (("GET", "/training_runs"), ("POST", "/retrieve_future"), ("POST", "/client/config")):
        refused = await cats.http.request(method, path, json={"request_id": waiting})
        assert (refused.status_code, refused.json()["code"]) == (403, "suspended"), path
        assert "unpaid" in refused.json()["detail"]
    assert (await cats.http.get(link)).status_code == 404
    assert (await dogs.http.get("/training_runs")).status_code == 200
    async with cats.service.database.write() as transaction:
        await resume_tenant(transaction, name="cats", now=cats.service.clock())
    assert (await cats.http.get(link)).status_code == 200
    resumed = (await cats.http.post("/retrieve_future", json={"request_id": waiting})).json()
    assert "no trainer" in resumed["queue_state_reason"]
