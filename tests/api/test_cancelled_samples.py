"""Samples that end before they are done: by their client, with its connection, its session or its key; another tenant's go on."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from sqlalchemy import event, func, select

from api import followed_sample
from api.sample_submission import SampleSubmission
from contracts.errors import FutureGone, Unavailable
from contracts.ids import RequestId, SamplerId
from contracts.ledger_records import NewOperation, OperationState
from contracts.operations import SampleRequest, SamplingParams
from contracts.vocabulary import BaseVocabulary
from ledger.cancellation import OfOperation, client_silent
from ledger.ledger import Ledger
from ledger.sample_intake import AcceptedSample
from ledger.wakeups import operation_topic
from store.repeat import wait_for
from store.settings import Settings
from store.tables import ApiKey, Operation, Session
from tenants.keys import create_key
from tenants.rights import KeyRights
from tenants.sessions import end_silent_sessions
from testing.tenants import end_key
from workers.housekeeping.housekeeping import Housekeeping
from workers.housekeeping.schedule import StepName

BASE = "test/tiny"
SECONDS = 60.0
MANY_KEYS = 60


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"reconnect_grace": timedelta(seconds=0.5)})


@pytest.fixture
def with_text(service) -> None:
    """Have the base turn every token into a letter, for OpenAI's endpoints."""
    letters = BaseVocabulary(frozenset(), encode=lambda text: [7] * len(text), decode=lambda tokens: "x" * len(tokens))
    service.services.vocabularies[BASE] = letters


async def sampler(tenant, session: str | None = None) -> str:
    body = {"session_id": session or await tenant.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    return (
        (await tenant.http.post("/create_sampling_session", json=body)).raise_for_status().json()["sampling_session_id"]
    )


def request(sampler: str, seq_id: int = 0) -> dict[str, Any]:
    prompt = {"chunks": [{"tokens": [5, 6, 7]}]}
    return {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": {"max_tokens": 50}}


async def asample(tenant, sampler: str, seq_id: int = 0) -> RequestId:
    answer = await tenant.http.post("/asample", json=request(sampler, seq_id))
    return RequestId(answer.raise_for_status().json()["request_id"])


async def end_of(tenant, request_id: RequestId) -> tuple[OperationState, str | None]:
    """Return the operation's status once it is final, or after a long time."""
    status = await tenant.service.ledger.wait_until_final(tenant.id, request_id, seconds=SECONDS)
    return status.state, status.error_code


async def newest(tenant) -> RequestId | None:
    async with tenant.service.database.read() as session:
        query = select(Operation.id).where(Operation.tenant_id == tenant.id).order_by(Operation.position.desc())
        return await session.scalar(query.limit(1))


@pytest_asyncio.fixture
async def beside(dogs) -> AsyncIterator[RequestId]:
    """A sample of another tenant, which is pending to the end."""
    pending = await asample(dogs, await sampler(dogs))
    yield pending
    assert (await dogs.service.ledger.status(dogs.id, pending)).state is OperationState.PENDING


CANCELLED = (OperationState.FAILED, "cancelled")
PENDING = (OperationState.PENDING, None)


# --- by the client ---------------------------------------------------------------------------------------------------


async def test_cancel_future_ends_a_sample_and_answers_who_polls_it(cats, dogs, beside) -> None:
    lane = await sampler(cats)
    first, second = await asample(cats, lane, 0), await asample(cats, lane, 1)
    polling = asyncio.create_task(cats.http.post("/retrieve_future", json={"request_id": first}))
    await cats.service.wakeups.until_listened(operation_topic(first))
    answer = await cats.http.post("/cancel_future", json={"request_id": first})
    assert (answer.status_code, answer.content) == (204, b"")
    polled = (await polling).json()
    assert (polled["category"], polled["error"]) == ("user", "cancelled by the client that sent it")
    # Again, and for what is not the caller's.
    assert (await cats.http.post("/cancel_future", json={"request_id": first})).status_code == 204
    assert (await dogs.http.post("/cancel_future", json={"request_id": second})).status_code == 404
    assert (await cats.http.post("/cancel_future", json={"request_id": beside})).status_code == 404
    assert (await cats.service.ledger.status(cats.id, second)).state is OperationState.PENDING


async def test_cancel_future_leaves_training_alone(cats) -> None:
    step = await cats.operation(await cats.run())
    answer = await cats.http.post("/cancel_future", json={"request_id": step})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert (await cats.service.ledger.status(cats.id, step)).state is OperationState.PENDING


# --- with the connection ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def openai_request(tenant, *, stream: bool, **headers: str) -> AsyncIterator[RequestId]:
    """A completion whose client leaves at the end of the block; yields its sample."""
    body = {"model": BASE, "prompt": [5, 6, 7], "max_tokens": 50, "stream": stream}
    before = await newest(tenant)
    sent = {"X-API-Key": tenant.key, **headers}
    async with httpx.AsyncClient(base_url=tenant.service.url, headers=sent, timeout=SECONDS) as client:
        asking = asyncio.create_task(_read(client, body))
        async with asyncio.timeout(SECONDS):
            while (accepted := await newest(tenant)) == before:
                await asyncio.wait([asking], timeout=0.02)
        assert accepted is not None
        await tenant.service.wakeups.until_listened(operation_topic(accepted))
        yield accepted
        asking.cancel()
        await asyncio.wait([asking])


async def _read(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        await answer.aread()


@pytest.mark.usefixtures("with_text", "beside")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_an_openai_request_ends_its_sample(cats, stream: bool) -> None:
    async with openai_request(cats, stream=stream) as sample:
        pass
    assert await end_of(cats, sample) == CANCELLED


@asynccontextmanager
async def followed(tenant, body: dict[str, Any]) -> AsyncIterator[RequestId]:
    """A sample that is streamed inside the block."""
    async with tenant.http.stream("POST", "/stream_sample", json=body) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: accepted"
        sample = await newest(tenant)
        assert sample is not None
        yield sample


@pytest.mark.usefixtures("beside")
async def test_a_client_that_leaves_a_stream_ends_its_sample_unless_it_comes_back(cats) -> None:
    lane, departures = await sampler(cats), cats.service.services.departures
    grace, departures._grace = departures._grace, SECONDS
    async with followed(cats, request(lane)) as sample:
        pass
    async with followed(cats, request(lane)) as again:
        departures._grace = grace
        assert again == sample
        # Longer than the grace time: another stream, left afterwards, has ended.
        async with followed(cats, request(lane, 1)) as other:
            pass
        assert await end_of(cats, other) == CANCELLED
        assert (await cats.service.ledger.status(cats.id, sample)).state is OperationState.PENDING
    assert await end_of(cats, sample) == CANCELLED


@pytest.mark.usefixtures("with_text")
async def test_no_sample_ends_because_its_server_does(cats) -> None:
    """Streams are told to come again, at once and without a read after another; their samples go on elsewhere."""
    lane = await sampler(cats)
    async with cats.http.stream("POST", "/stream_sample", json=request(lane)) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: accepted"
        sample = await newest(cats)
        cats.service.wakeups.close()
        async with asyncio.timeout(SECONDS):
            rest = [line async for line in lines]
    assert "event: error" in rest
    assert '"code":"unavailable","retryable":true' in rest[rest.index("event: error") + 1]
    assert (await cats.service.ledger.status(cats.id, sample)).state is OperationState.PENDING


def once_unavailable(monkeypatch, method: str) -> asyncio.Event:
    """Have the database not answer the ledger's next call of the method; the event tells when it has not."""
    failed, whole = asyncio.Event(), getattr(Ledger, method)

    async def call(*args: Any, **more: Any) -> Any:
        if failed.is_set():
            return await whole(*args, **more)
        failed.set()
        raise Unavailable("the database does not answer")

    monkeypatch.setattr(Ledger, method, call)
    return failed


@pytest.mark.usefixtures("with_text", "beside")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_stream_outlasts_an_outage_and_its_sample_ends_with_its_client(cats, monkeypatch, stream: bool) -> None:
    monkeypatch.setattr("api.followed_sample._OUTAGE_SECONDS", 0.02)
    failed = once_unavailable(monkeypatch, "wait_until_final")
    async with asyncio.timeout(SECONDS), openai_request(cats, stream=stream) as sample:
        # Listened to again, after the outage.
        assert failed.is_set()
    assert await end_of(cats, sample) == CANCELLED


@pytest.mark.usefixtures("with_text", "beside")
async def test_a_sample_of_a_client_that_left_in_an_outage_ends_after_it(cats, monkeypatch) -> None:
    monkeypatch.setattr("api.departures.LOOK_SECONDS", 0.02)
    failed = once_unavailable(monkeypatch, "cancel")
    async with openai_request(cats, stream=True) as sample:
        pass
    assert await end_of(cats, sample) == CANCELLED
    assert failed.is_set()


@pytest.mark.usefixtures("beside")
async def test_a_client_that_leaves_while_its_sample_is_accepted_ends_it(cats, monkeypatch) -> None:
    intake, recorded, go_on = cats.service.services.sample_intake, asyncio.Event(), asyncio.Event()
    accept = intake.accept_together

    async def held(samples: Sequence[NewOperation]) -> list[AcceptedSample]:
        accepted = await accept(samples)
        recorded.set()
        await go_on.wait()
        return accepted

    monkeypatch.setattr(intake, "accept_together", held)
    new = SampleRequest(np.array([5, 6, 7]), 1, SamplingParams(max_tokens=50))
    submission = SampleSubmission(cats.id, SamplerId(await sampler(cats)), 0, BASE, new, b"a sample", may_return=False)
    following = asyncio.create_task(followed_sample.followed(cats.service.services, submission).__aenter__())
    async with asyncio.timeout(SECONDS):
        await recorded.wait()
        following.cancel()
        await asyncio.wait([following])
    go_on.set()
    sample = await newest(cats)
    assert sample is not None
    assert await end_of(cats, sample) == CANCELLED


# --- with the session ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("beside")
async def test_a_session_that_is_finished_takes_its_samples_along(cats) -> None:
    ended, kept = await cats.session(), await cats.session()
    first, second = await asample(cats, await sampler(cats, ended)), await asample(cats, await sampler(cats, kept))
    assert (await cats.http.post(f"/sessions/{ended}/finish", json={})).status_code == 204
    assert await end_of(cats, first) == CANCELLED
    assert (await cats.service.ledger.status(cats.id, second)).state is OperationState.PENDING


async def test_samples_of_a_silent_session_end_and_those_that_are_followed_do_not(
    cats, dogs, clock, monkeypatch
) -> None:
    """A client that follows a stream counts as there, without a heartbeat."""
    monkeypatch.setattr("api.followed_sample.SILENCE_SECONDS", 0.05)
    service, theirs = cats.service, await dogs.session()
    silent, beside = await asample(cats, await sampler(cats)), await asample(dogs, await sampler(dogs, theirs))
    mine = await cats.session()
    async with followed(cats, request(await sampler(cats, mine))) as streamed:
        clock.move(minutes=50)
        (await dogs.http.post("/session_heartbeat", json={"session_id": theirs})).raise_for_status()
        await until_heard_of(cats, mine)
        clock.move(minutes=50)
        async with service.database.write() as transaction:
            await end_silent_sessions(transaction, silent_since=clock() - timedelta(hours=1), now=clock(), most=10)
        await Housekeeping(service.services.runtime, lambda: False).run_step(StepName.CANCEL_SAMPLES)
        assert await end_of(cats, silent) == CANCELLED
        for tenant, sample in ((cats, streamed), (dogs, beside)):
            assert (await service.ledger.status(tenant.id, sample)).state is OperationState.PENDING


async def until_heard_of(tenant, session_id: str) -> None:
    """Wait until the session's client was heard of at the clock's time."""
    async with asyncio.timeout(SECONDS):
        heard = False
        while not heard:
            async with tenant.service.database.read() as session:
                seen = await session.scalar(select(Session.last_seen_at).where(Session.id == session_id))
            heard = seen == tenant.service.clock()
            await wait_for(asyncio.Event(), 0.02)


# --- with the key ----------------------------------------------------------------------------------------------------


async def second_key(tenant) -> str:
    """Make a key that expires in ten seconds."""
    clock = tenant.service.clock
    rights = KeyRights(expires_at=clock() + timedelta(seconds=10))
    async with tenant.service.database.write() as transaction:
        made = await create_key(transaction, tenant=tenant.id, note="", clock=clock, rights=rights)
    return made.secret


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("by", ["its owner", "an operator", "its time"])
async def test_a_key_that_ends_takes_its_samples_along_and_leaves_those_of_other_keys(
    cats, by: str, looks: bool
) -> None:
    """Looking ends them within a second, and housekeeping when nobody looked."""
    service, lane = cats.service, await sampler(cats)
    kept = await asample(cats, lane, 0)
    secret = await second_key(cats)
    async with httpx.AsyncClient(base_url=cats.http.base_url, headers={"X-API-Key": secret}, timeout=40) as other:
        promise = (await other.post("/asample", json=request(lane, 1))).raise_for_status().json()
        if by == "its owner":
            assert (await other.delete("/auth/apikey/me")).status_code == 204
    if by == "an operator":
        await end_key(service.database, secret)
    elif by == "its time":
        service.clock.move(seconds=9)
        await service.services.ended_keys.look()
        assert (await service.ledger.status(cats.id, promise["request_id"])).state is OperationState.PENDING
        service.clock.move(seconds=1)
    if looks:
        await service.services.ended_keys.look()
    else:
        await Housekeeping(service.services.runtime, lambda: False).sweep()
    assert await end_of(cats, promise["request_id"]) == CANCELLED
    assert (await service.ledger.status(cats.id, kept)).state is OperationState.PENDING


async def test_keys_that_end_at_once_are_known_at_once_and_their_samples_end_tenant_by_tenant(cats, dogs) -> None:
    """Very many keys of one tenant keep the end of another's waiting for one short transaction."""
    service, promises = cats.service, []
    for tenant, keys in ((cats, MANY_KEYS), (dogs, 1)):
        lane = await sampler(tenant)
        secret = [await second_key(tenant) for _ in range(keys)][-1]
        async with httpx.AsyncClient(
            base_url=tenant.http.base_url, headers={"X-API-Key": secret}, timeout=SECONDS
        ) as other:
            promises.append(
                (await other.post("/asample", json=request(lane, 1))).raise_for_status().json()["request_id"]
            )
        kept = await asample(tenant, lane, 2)
    service.clock.move(seconds=10)
    sent: list[str] = []
    event.listen(service.database.engine.sync_engine, "before_cursor_execute", lambda *call: sent.append(call[2]))
    await service.services.ended_keys.look()
    assert len(sent) < MANY_KEYS
    for tenant, promise in zip((cats, dogs), promises, strict=True):
        assert await end_of(tenant, promise) == CANCELLED
    assert (await service.ledger.status(dogs.id, kept)).state is OperationState.PENDING


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("by", ["an operator", "its time"])
async def test_a_stream_ends_soon_after_its_key(cats, by: str) -> None:
    """A key revoked by the admin command: another process writes to the database, and tells nobody. Time tells nobody, too."""
    lane, secret = await sampler(cats), await second_key(cats)
    looking = asyncio.create_task(cats.service.services.ended_keys.run())
    async with (
        httpx.AsyncClient(base_url=cats.http.base_url, headers={"X-API-Key": secret}, timeout=SECONDS) as other,
        other.stream("POST", "/stream_sample", json=request(lane)) as answer,
    ):
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: accepted"
        if by == "an operator":
            await end_key(cats.service.database, secret)
        else:
            cats.service.clock.move(seconds=10)
        async with asyncio.timeout(SECONDS):
            rest = [line async for line in lines]
    looking.cancel()
    assert '"code":"cancelled","retryable":false' in rest[rest.index("event: error") + 1]


async def test_operations_carry_the_key_that_brought_them(cats) -> None:
    await asample(cats, await sampler(cats))
    run = await cats.run()
    await cats.http.post("/optim_step", json={"model_id": run, "seq_id": 1})
    async with cats.service.database.read() as session:
        key = await session.scalar(select(ApiKey.id).where(ApiKey.tenant_id == cats.id))
        with_key = select(func.count()).where(Operation.tenant_id == cats.id, Operation.key_id == key)
        assert await session.scalar(with_key) == 2


async def test_a_poll_for_a_sample_of_a_client_that_was_silent_has_the_sdk_send_it_again(service, cats, dogs) -> None:
    theirs = await asample(dogs, await sampler(dogs))
    mine = await asample(cats, await sampler(cats))
    ledger = service.services.runtime.ledger
    async with service.services.runtime.database.write() as transaction:
        await ledger.cancel(transaction, OfOperation(mine, cats.id), client_silent(), only_samples=True)
    told = await cats.http.post("/retrieve_future", json={"request_id": mine})
    assert (told.status_code, told.json()["code"]) == (410, FutureGone.code)
    assert "no heartbeat" in told.text
    assert (await ledger.status(dogs.id, theirs)).state is OperationState.PENDING
