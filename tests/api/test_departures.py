"""Ends of samples whose clients have left: each time that a client leaves, it has the whole grace time to come back."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import pytest_asyncio

from api.departures import Departures
from contracts.errors import Cancelled
from contracts.ids import RequestId
from contracts.ledger_records import OperationState
from ledger.token_feed import FeedKey, TokenFeed
from store.settings import Settings
from tests.api.conftest import BASE, Service, Tenant

GRACE_SECONDS = 1.0


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"reconnect_grace": timedelta(seconds=GRACE_SECONDS)})


class Looks:
    """The seconds that departures read, which stand still until they are moved, and their looks at followers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self._look = asyncio.Event()
        is_followed = TokenFeed.is_followed

        def noted(feed: TokenFeed, key: FeedKey) -> bool:
            self._look.set()
            return is_followed(feed, key)

        monkeypatch.setattr("api.departures.LOOK_SECONDS", 0.02)
        monkeypatch.setattr("api.departures.monotonic", lambda: self.seconds)
        monkeypatch.setattr(TokenFeed, "is_followed", noted)

    async def after(self, seconds: float) -> None:
        """Let the time pass, and wait until what the looks after it had to do is done."""
        self.seconds += seconds
        for _ in range(4):
            self._look.clear()
            await asyncio.wait_for(self._look.wait(), 60)


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


async def sample_of(tenant: Tenant) -> tuple[str, RequestId]:
    """Return the sampler and the id of a new sample with seq_id 0."""
    opened = {"session_id": await tenant.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    made = (await tenant.http.post("/create_sampling_session", json=opened)).raise_for_status().json()
    sampler = made["sampling_session_id"]
    prompt = {"chunks": [{"tokens": [5, 6, 7]}]}
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 50}}
    return sampler, (await tenant.http.post("/asample", json=body)).raise_for_status().json()["request_id"]


@pytest_asyncio.fixture
async def beside(dogs: Tenant) -> AsyncIterator[RequestId]:
    """A sample of another tenant, which is pending to the end."""
    _, pending = await sample_of(dogs)
    yield pending
    assert await state_of(dogs, pending) is OperationState.PENDING


async def state_of(tenant: Tenant, sample: RequestId) -> OperationState:
    return (await tenant.service.ledger.status(tenant.id, sample)).state


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("where", ["this process", "another process"])
async def test_a_client_that_comes_back_has_the_whole_grace_when_it_leaves_again(
    service: Service, cats: Tenant, looks: Looks, where: str
) -> None:
    """The departures of another process tell this one's nothing: only the feed says that the client was back."""
    sampler, sample = await sample_of(cats)
    runtime, key = service.services.runtime, (sampler, 0)
    first = Departures(runtime)
    second = first if where == "this process" else Departures(runtime)
    first.left(key, cats.id, sample, may_return=True)
    with runtime.feed.follow(key):
        await looks.after(1.5 * GRACE_SECONDS)
    second.left(key, cats.id, sample, may_return=True)
    await looks.after(0.3 * GRACE_SECONDS)
    with runtime.feed.follow(key):
        await looks.after(1.5 * GRACE_SECONDS)
        assert await state_of(cats, sample) is OperationState.PENDING
    first.left(key, cats.id, sample, may_return=True)
    await looks.after(0.5 * GRACE_SECONDS)
    assert await state_of(cats, sample) is OperationState.PENDING
    looks.seconds += GRACE_SECONDS
    status = await service.ledger.wait_until_final(cats.id, sample, seconds=60)
    assert (status.state, status.error_code) == (OperationState.FAILED, Cancelled.code)


async def test_a_sample_has_one_departure_however_often_its_client_leaves(service: Service, cats: Tenant) -> None:
    sampler, sample = await sample_of(cats)
    departures = service.services.departures
    for _ in range(3):
        departures.left((sampler, 0), cats.id, sample, may_return=True)
        await asyncio.sleep(0)
    assert [task.get_name() for task in asyncio.all_tasks()].count(f"left {sample}") == 1
