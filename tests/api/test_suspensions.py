"""A suspended tenant's polls say why its work waits; a second tenant's do not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import openai
import pytest
from sqlalchemy import func, select

from contracts.ledger_records import OperationState
from contracts.operations import OptimStepped
from contracts.vocabulary import BaseVocabulary
from ledger.wakeups import operation_topic
from store.settings import Settings
from store.tables import Operation
from tenants.rights import SuspendMode
from tenants.suspensions import resume_tenant, suspend_tenant
from tests.api.conftest import BASE
from tests.api.test_rates import ask, finish_samples, poll, sampler


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"poll_hold": timedelta(milliseconds=50), "reconnect_grace": timedelta(0)})


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


@pytest.mark.usefixtures("with_text")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/v1/stream_sample", None),
        ("/v1/completions", {"model": BASE, "prompt": [1, 2], "stream": True}),
        ("/v1/completions", {"model": BASE, "prompt": [1, 2]}),
    ],
)
async def test_a_block_ends_what_is_followed_on_a_connection_and_only_that(cats, dogs, path: str, body) -> None:
    """The follower reads why, and its sample ends as if it had left. A sample that is polled for waits."""
    lane, answers = await sampler(cats), []
    polled = (await ask(cats, lane, 1)).json()["request_id"]
    for tenant, own in ((cats, lane), (dogs, await sampler(dogs))):
        before = await newest(tenant)
        asked = body or {
            "sampling_session_id": own,
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [5]}]},
            "sampling_params": {"max_tokens": 8},
        }
        answers.append(asyncio.create_task(tenant.http.post(f"{tenant.service.url}{path}", json=asked, timeout=120)))
        async with asyncio.timeout(60):
            while (followed := await newest(tenant)) == before:
                await asyncio.wait(answers, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
            await tenant.service.wakeups.until_listened(operation_topic(followed))
        if tenant is cats:
            mine = followed
    await _suspend(cats, SuspendMode.BLOCKED)
    await cats.service.services.ended_keys.look()
    told = await asyncio.wait_for(answers[0], 60)
    assert "this tenant is blocked: unpaid" in told.text
    ended = await cats.service.ledger.wait_until_final(cats.id, mine, seconds=60)
    assert (ended.state, ended.error_code) == (OperationState.FAILED, "cancelled")
    assert (await cats.service.ledger.status(cats.id, polled)).state is OperationState.PENDING
    assert await finish_samples(cats.service) == 1
    assert (await asyncio.wait_for(answers[1], 60)).status_code == 200
    assert "blocked" not in answers[1].result().text


# --- OpenAI's clients ------------------------------------------------------------------------------------------------


@pytest.fixture
def with_text(service) -> None:
    """Have the base turn every token into a letter, and every message into a token."""
    service.services.vocabularies[BASE] = BaseVocabulary(
        frozenset(),
        decode=lambda tokens: "x" * len(tokens),
        chat=lambda messages, tools: [7] * len(messages),
    )


@asynccontextmanager
async def openai_client(tenant) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{tenant.service.url}/v1", api_key=tenant.key, max_retries=0, timeout=60
    ) as client:
        yield client


async def newest(tenant) -> str | None:
    async with tenant.service.database.read() as session:
        query = select(Operation.id).where(Operation.tenant_id == tenant.id).order_by(Operation.position.desc())
        return await session.scalar(query.limit(1))


@asynccontextmanager
async def completing(tenant, **headers: str) -> AsyncIterator[asyncio.Task]:
    """A completion that was accepted and waits, inside the block."""
    async with openai_client(tenant) as client:
        before = await newest(tenant)
        asking = asyncio.create_task(
            client.completions.create(model=BASE, prompt=[1, 2], max_tokens=8, extra_headers=headers)
        )
        async with asyncio.timeout(60):
            while (accepted := await newest(tenant)) == before:
                await asyncio.wait([asking], timeout=0.02)
                assert not asking.done(), asking.exception()
            assert accepted is not None
            await tenant.service.wakeups.until_listened(operation_topic(accepted))
        yield asking
        await asyncio.wait_for(asking, 60)


@pytest.mark.usefixtures("with_text")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_openai_client_of_a_held_tenant_is_told_when_to_come_again_and_why(cats, dogs, stream: bool) -> None:
    """The SDK's sample is accepted all the while, and its poll tells the reason."""
    await _suspend(cats, SuspendMode.HOLD)
    lane = await sampler(cats)
    async with openai_client(cats) as client:
        says = [{"role": "user", "content": "x"}]
        for create, asked in (
            (client.completions.create, {"prompt": [1, 2]}),
            (client.chat.completions.create, {"messages": says}),
        ):
            with pytest.raises(openai.RateLimitError) as told:
                await create(model=BASE, max_tokens=8, stream=stream, **asked)
            assert told.value.response.headers["retry-after"] == "10"
            assert (told.value.code, told.value.type) == ("tenant_held", "rate_limit_error")
            assert "unpaid" in told.value.message
        assert [model.id async for model in client.models.list()] == [BASE]
    assert await newest(cats) is None
    held = await poll(cats, await ask(cats, lane, 0))
    assert (held["status"], held["queue_state"], "unpaid" in held["queue_state_reason"]) == (
        408,
        "paused_capacity",
        True,
    )
    async with completing(dogs) as theirs:
        assert await finish_samples(cats.service) == 1
    assert theirs.result().choices[0].finish_reason == "stop"
    async with cats.service.database.write() as transaction:
        await resume_tenant(transaction, name="cats", now=cats.service.clock())
    async with completing(cats) as mine:
        assert await finish_samples(cats.service) == 2
    assert mine.result().choices[0].text == theirs.result().choices[0].text


@pytest.mark.usefixtures("with_text")
async def test_an_openai_request_that_was_accepted_before_the_hold_waits_and_a_repeat_finds_it(cats, dogs) -> None:
    once = {"Idempotency-Key": "once"}
    async with completing(cats, **once) as asking:
        await _suspend(cats, SuspendMode.HOLD)
        assert await finish_samples(cats.service) == 0
        assert not asking.done()
        async with completing(dogs):
            assert await finish_samples(cats.service) == 1
        async with cats.service.database.write() as transaction:
            await resume_tenant(transaction, name="cats", now=cats.service.clock())
        assert await finish_samples(cats.service) == 1
    await _suspend(cats, SuspendMode.HOLD)
    async with openai_client(cats) as client:
        again = await client.completions.create(model=BASE, prompt=[1, 2], max_tokens=8, extra_headers=once)
    assert again.id == asking.result().id
    async with cats.service.database.read() as session:
        count = select(func.count()).select_from(Operation).where(Operation.tenant_id == cats.id)
        assert await session.scalar(count) == 1
