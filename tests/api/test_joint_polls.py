"""``retrieve_futures``: one poll for all samples of one copy of a sampling client."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import httpx
import numpy as np
import pytest
from sqlalchemy import event, insert
from tinker._client import AsyncTinker
from tinker.lib.session_futures_poller import SessionFuturesPoller
from tinker.types.futures_retrieve_response import FuturesRetrieveResponse

from contracts.errors import EngineFailure
from contracts.ids import SamplerId
from contracts.ledger_records import Completion
from contracts.operations import SampledSequence, SampleOutput
from ledger.told_ends import MOST_ENDS
from ledger.wakeups import ended_samples_topic
from store.settings import Settings
from store.tables import Operation
from tenants.suspensions import suspend_tenant
from tests.ledger_heads import pending_samples

DRAWN = SampleOutput([SampledSequence("stop", np.array([7], np.int32), np.array([-0.5], np.float32))])
OF_FIRST_COPY = 1_000_000_000
ENDS, POLLS = 5, 60
HOLD = timedelta(minutes=5)
"""Hold of polls that nothing but an end may answer."""


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"poll_hold": HOLD})


async def open_sampler(tenant) -> str:
    session = (await tenant.http.post("/create_session", json={"sdk_version": "0.38.0"})).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "test/tiny"}
    sampler: str = (await tenant.http.post("/create_sampling_session", json=body)).json()["sampling_session_id"]
    return sampler


async def sample(tenant, sampler: str, seq_id: int) -> str:
    body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": {"chunks": [{"tokens": [1, 2]}]}}
    answer = await tenant.http.post("/asample", json={**body, "sampling_params": {"max_tokens": 4}})
    found: str = answer.json()["request_id"]
    return found


async def finish(service, *request_ids: str, outcome=DRAWN) -> None:
    async with service.database.read() as session:
        waiting = await pending_samples(service.ledger, session, "test/tiny")
    chosen = [Completion(one, outcome) for one in waiting if one.id in request_ids]
    async with service.database.write() as transaction:
        await service.ledger.complete(transaction, chosen)


async def poll(tenant, sampler: str, cursor: int = 0, *, copy: int = 0, **more: object) -> httpx.Response:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": copy}
    body = {"target": target, "prev_cursor": cursor, **more}
    return await tenant.http.post("/retrieve_futures", json=body, timeout=2 * HOLD.total_seconds())


def read(answer: httpx.Response) -> FuturesRetrieveResponse:
    """Return an answer as the SDK reads it."""
    assert answer.status_code == 200, answer.text
    return FuturesRetrieveResponse.model_validate(answer.json())


async def test_a_held_poll_is_woken_by_the_end_of_its_copys_samples_only(cats, dogs, service) -> None:
    mine, other = await open_sampler(cats), await open_sampler(dogs)
    first, of_copy = await sample(cats, mine, 0), await sample(cats, mine, OF_FIRST_COPY)
    foreign = await sample(dogs, other, 0)
    held = asyncio.create_task(poll(cats, mine))
    await service.wakeups.until_listened(ended_samples_topic(mine))
    await finish(service, foreign)
    await finish(service, of_copy)
    async with asyncio.timeout(60):
        told = read(await poll(cats, mine, copy=1))
        assert [one.request_id for one in told.completions] == [of_copy]
        assert [one.request_id for one in read(await poll(dogs, other)).completions] == [foreign]
        assert not held.done()
        await finish(service, first)
        answer = read(await held)
    assert [(one.request_id, one.state) for one in answer.completions] == [(first, "finished")]
    assert answer.completions[0].response_payload_uncompressed_size > 0


async def test_very_many_polls_of_a_sampler_cost_no_more_at_an_end_than_one(cats, dogs, service) -> None:
    mine, other = await open_sampler(cats), await open_sampler(dogs)
    own = [await sample(cats, mine, number) for number in range(ENDS)]
    foreign = await sample(dogs, other, 0)
    held = [asyncio.create_task(poll(cats, mine, copy=999)) for _ in range(POLLS)]
    theirs = asyncio.create_task(poll(dogs, other))
    async with asyncio.timeout(60):
        while len(service.services.waiting_polls.waiting(SamplerId(mine))) < POLLS:  # noqa: ASYNC110
            await asyncio.sleep(0)
        sent: list[str] = []
        event.listen(service.database.engine.sync_engine, "before_cursor_execute", lambda *call: sent.append(call[2]))
        for one in own:
            await finish(service, one)
            assert [end.request_id for end in read(await poll(cats, mine)).completions][-1] == one
        looks = [one for one in sent if "told_as" in one]
        assert len(looks) < 10 * ENDS
        await finish(service, foreign)
        assert [one.request_id for one in read(await theirs).completions] == [foreign]
    assert not any(one.done() for one in held)
    for one in held:
        one.cancel()
    await asyncio.gather(*held, return_exceptions=True)


class TestAtOnce:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"poll_hold": timedelta(milliseconds=20)})

    async def test_each_end_is_told_once_to_a_client_that_sends_its_cursor_on(self, cats, service) -> None:
        sampler = await open_sampler(cats)
        samples = [await sample(cats, sampler, number) for number in range(3)]
        await finish(service, samples[1])
        first = read(await poll(cats, sampler))
        await finish(service, samples[0], outcome=EngineFailure("no"))
        second = read(await poll(cats, sampler, first.cursor, retrieved_request_ids=samples[1:2]))
        assert [(one.request_id, one.state) for one in first.completions] == [(samples[1], "finished")]
        assert [(one.request_id, one.state) for one in second.completions] == [(samples[0], "failed")]
        nothing = read(await poll(cats, sampler, second.cursor))
        assert (nothing.completions, nothing.cursor) == ([], second.cursor)
        # A poll whose answer was lost is sent again.
        assert read(await poll(cats, sampler, first.cursor)).completions == second.completions

    async def test_a_cancelled_sample_is_told_as_failed(self, cats) -> None:
        sampler = await open_sampler(cats)
        request_id = await sample(cats, sampler, 0)
        (await cats.http.post("/cancel_future", json={"request_id": request_id})).raise_for_status()
        told = read(await poll(cats, sampler)).completions
        assert [(one.request_id, one.state) for one in told] == [(request_id, "failed")]

    async def test_samples_of_an_ended_session_are_told(self, cats, service) -> None:
        sampler = await open_sampler(cats)
        request_id = await sample(cats, sampler, 0)
        await finish(service, request_id)
        session = sampler.partition(":")[0]
        await cats.http.post(f"/sessions/{session}/finish", json={"reason": {"type": "success"}})
        assert [one.request_id for one in read(await poll(cats, sampler)).completions] == [request_id]

    async def test_a_poll_in_which_nothing_ended_tells_the_reason_that_a_single_poll_tells(
        self, cats, dogs, service
    ) -> None:
        mine, theirs = await open_sampler(cats), await open_sampler(dogs)
        waiting = await sample(cats, mine, OF_FIRST_COPY + 3)
        other = await sample(cats, mine, 3)
        async with service.database.write() as transaction:
            await suspend_tenant(transaction, name="cats", reason="the invoice is open", now=service.clock())
        for request, copy in ((waiting, 1), (other, 0)):
            single = (await cats.http.post("/retrieve_future", json={"request_id": request})).json()
            joint = (await poll(cats, mine, copy=copy, timeout=0)).json()
            assert "the invoice is open" in joint["queue_state_reason"]
            told = {name: single[name] for name in ("queue_state", "queue_state_reason")}
            assert {name: joint[name] for name in told} == told
        empty = (await poll(dogs, theirs, timeout=0)).json()
        assert (empty["queue_state"], empty["queue_state_reason"]) == (None, None)
        assert read(await poll(cats, mine, timeout=0)).completions == []


async def long_history(tenant, sampler: str, pages: int) -> int:
    """Give the sampler the told ends of so many pages, all of its first client; return the highest number."""
    row = {"tenant_id": tenant.id, "lane": sampler, "kind": "sample", "base_model": "test/tiny", "state": "done"}
    now = tenant.service.clock()
    of_each = {**row, "body_digest": b"", "tokens": 2, "created_at": now, "finished_at": now}
    rows = [{**of_each, "id": f"r{n}", "seq_id": n, "told_as": n} for n in range(1, pages * MOST_ENDS + 1)]
    async with tenant.service.database.write() as transaction:
        await transaction.execute(insert(Operation), rows)
    return len(rows)


class SdkHolder:
    """The parts of the SDK's holder that its poller uses, over a real client."""

    def __init__(self, client: AsyncTinker) -> None:
        self._client = client
        self.tasks: list[asyncio.Task[None]] = []

    def track_futures_poller_task(self, task: asyncio.Task[None]) -> None:
        """Hold the task."""
        self.tasks.append(task)

    @contextmanager
    def aclient(self, _pool_type: object) -> Iterator[AsyncTinker]:
        """Lend the client."""
        yield self._client


async def test_a_poll_passes_over_few_pages_of_other_copies_and_the_sdk_goes_on(cats, dogs, service) -> None:
    mine, other = await open_sampler(cats), await open_sampler(dogs)
    last = await long_history(cats, mine, 9)
    of_copy, foreign = await sample(cats, mine, OF_FIRST_COPY), await sample(dogs, other, 0)
    await finish(service, of_copy, foreign)
    # Held for long, unless the answer is that there is more.
    async with asyncio.timeout(60):
        passed = read(await poll(cats, mine, copy=1))
        further = read(await poll(cats, mine, passed.cursor, copy=1, timeout=0))
        assert [one.request_id for one in read(await poll(dogs, other)).completions] == [foreign]
    assert (passed.completions, further.completions) == ([], [])
    assert 0 < passed.cursor < further.cursor < last
    async with AsyncTinker(api_key=cats.key, base_url=service.url, _strict_response_validation=True) as client:
        holder = SdkHolder(client)
        poller = SessionFuturesPoller(holder, sampling_session_id=mine, cloned_sampler_id=1)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            assert (await poller.wait_for(of_copy)).request_id == of_copy
        poller.close()
        await asyncio.gather(*holder.tasks, return_exceptions=True)


async def test_a_timeout_of_zero_answers_at_once(cats) -> None:
    async with asyncio.timeout(60):
        assert read(await poll(cats, await open_sampler(cats), timeout=0)).completions == []


async def test_a_foreign_sampler_is_404(cats, dogs, service) -> None:
    mine = await open_sampler(cats)
    await finish(service, await sample(cats, mine, 0))
    refused = await poll(dogs, mine)
    assert (refused.status_code, refused.json()["code"]) == (404, "not_found")
    assert len(read(await poll(cats, mine)).completions) == 1


@pytest.mark.parametrize("cursor", [-1, 2**63])
async def test_a_cursor_that_no_answer_gave_is_refused(cats, cursor: int) -> None:
    refused = await poll(cats, await open_sampler(cats), cursor)
    assert (refused.status_code, refused.json()["detail"].partition(":")[0]) == (400, "prev_cursor")
