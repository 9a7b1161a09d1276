"""Operations that are ended from outside: who is answered, what goes on, and that nobody else notices; both databases."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from sqlalchemy import select, update

from contracts.errors import Cancelled, LeaseLost, RunUnloaded, WeftError
from contracts.ids import RequestId, RunId, SamplerId, SessionId, TenantId
from contracts.ledger_records import UNLOAD_SEQ_ID, Completion, NewOperation, OperationState
from contracts.operations import (
    CreateModel,
    LoraSettings,
    OperationKind,
    OptimStep,
    OptimStepped,
    Payload,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    UnloadModel,
)
from ledger.cancellation import OfKeys, OfLane, OfOperation, OfSession, OfTenant, Selection, client_silent
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.pruning import prune
from ledger.wakeups import Wakeups, cancelled_samples_topic, operation_topic, recalls_topic
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.tables import ApiKey, Operation, OperationPayload, Run, RunState
from telemetry.telemetry import Telemetry
from tenants.budget_settings import BudgetName, budgets_of, set_budget
from tenants.budgets import Period
from tenants.keys import create_key
from tenants.price_additions import NewPrice, add_price
from tenants.prices import PricedQuantity
from tenants.runs import NewRun
from tenants.samplers import NewSampler, create_sampler
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from tenants.usage import tokens_since, usage
from tenants.usage_costs import priced_page
from tenants.usage_hours import BucketWidth
from testing.runs import create_run
from tests.ledger_heads import TRAINER, ready_heads
from tests.payloads import digest, stored

BASE = "test/tiny"
WHY = Cancelled("cancelled by the test")


@dataclass
class Owner:
    """A tenant with a key, a session, a ready run and a sampler."""

    ledger: Ledger
    database: Database
    tenant: TenantId
    key: int
    session: SessionId
    run: RunId
    sampler: SamplerId
    accepted: list[RequestId] = field(default_factory=list)

    async def send(
        self, lane: str, seq_id: int, payload: Payload, kind: OperationKind, *, tokens: int = 0
    ) -> RequestId:
        tokens = len(payload.prompt) if isinstance(payload, SampleRequest) else tokens
        new = NewOperation(
            self.tenant, lane, seq_id, kind, BASE, stored(payload), digest(payload), tokens=tokens, key_id=self.key
        )
        async with self.database.write() as transaction:
            self.accepted.append(await self.ledger.accept(transaction, new))
        return self.accepted[-1]

    async def step(self, seq_id: int) -> RequestId:
        return await self.send(self.run, seq_id, OptimStep(learning_rate=seq_id * 1e-3), OperationKind.OPTIM_STEP)

    async def train(self, seq_id: int, *, tokens: int, run: str | None = None) -> RequestId:
        payload = OptimStep(learning_rate=seq_id * 1e-3)
        return await self.send(run or self.run, seq_id, payload, OperationKind.OPTIM_STEP, tokens=tokens)

    async def sample(self, seq_id: int) -> RequestId:
        request = SampleRequest(prompt=np.array([1, 2, 3], dtype=np.int64))
        return await self.send(self.sampler, seq_id, request, OperationKind.SAMPLE)

    async def states(self) -> list[OperationState]:
        return [(await self.ledger.status(self.tenant, one)).state for one in self.accepted]

    async def next_seq_id(self) -> int:
        async with self.database.read() as session:
            return await session.scalar(select(Run.next_seq_id).where(Run.id == self.run)) or 0


@dataclass
class Two:
    """A ledger with two tenants."""

    database: Database
    ledger: Ledger
    cat: Owner
    dog: Owner

    async def cancel(self, selection: Selection, why: WeftError = WHY, *, only_samples: bool = False) -> set[str]:
        async with self.database.write() as transaction:
            ended = await self.ledger.cancel(transaction, selection, why, only_samples=only_samples)
        return {one.id for one in ended}


@pytest_asyncio.fixture
async def two(database_url: str, tmp_path: Path) -> AsyncIterator[Two]:
    database, wakeups = Database(create_engine(database_url)), Wakeups()
    ledger = Ledger(database, wakeups, utc_now, Telemetry.of("test", utc_now), PayloadFiles(DataFolder(tmp_path)))
    cat, dog = [await owner(database, ledger, name) for name in ("cat", "dog")]
    yield Two(database, ledger, cat, dog)
    await database.close()


async def owner(database: Database, ledger: Ledger, name: str) -> Owner:
    async with database.write() as transaction:
        tenant = await create_tenant(transaction, name=name, clock=utc_now)
        made = await create_key(transaction, tenant=tenant, note="", clock=utc_now)
        key = await transaction.scalar(select(ApiKey.id).where(ApiKey.prefix == made.prefix))
        assert key is not None
        session = await create_session(transaction, tenant, NewSession([], None, "", None, None), utc_now)
        run = await create_run(transaction, tenant, NewRun(session, 0, BASE, LoraSettings(4, seed=7), None), utc_now)
        await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.READY, next_seq_id=1))
        sampler = await create_sampler(transaction, tenant, NewSampler(session, 0, BASE), utc_now)
    return Owner(ledger, database, tenant, key, session, run, sampler)


async def test_a_cancelled_operation_answers_its_poller_and_leaves_no_hole(two: Two) -> None:
    cat, dog = two.cat, two.dog
    first, second = await cat.step(1), await cat.step(2)
    await cat.step(3)
    await dog.step(1)
    with two.ledger.wakeups.listen(operation_topic(second)) as event:
        assert await two.cancel(OfOperation(second)) == {second}
        # Polls wait for this.
        assert event.is_set()
    status = await two.ledger.status(cat.tenant, second)
    assert (status.state, status.error_code, status.error_category) == (OperationState.FAILED, "cancelled", "user")
    assert status.error_message == "cancelled by the test"
    assert await cat.next_seq_id() == 1
    async with two.database.read() as session:
        heads = {one.lane: one for one in await ready_heads(two.ledger, session, BASE)}
        leases = await two.ledger.leases(session, [cat.run, dog.run])
    assert heads[cat.run].id == first
    async with two.database.write() as transaction:
        await two.ledger.complete(transaction, [Completion(one, OptimStepped({})) for one in heads.values()])
    assert leases.keys() == {cat.run, dog.run}
    assert (await cat.next_seq_id(), await dog.next_seq_id()) == (3, 2)


async def test_an_operation_that_failed_keeps_no_payload(two: Two) -> None:
    """Nothing computes it again, and a tenant whose work fails could fill the disk for as long as results are kept."""
    cat, dog = two.cat, two.dog
    failed, cancelled, kept = await cat.step(1), await cat.step(2), await dog.step(1)
    sampled = await dog.sample(1)
    assert await payloads(two.database) == {failed, cancelled, kept, sampled}
    await two.cancel(OfOperation(cancelled))
    assert await payloads(two.database) == {failed, kept, sampled}
    async with two.database.read() as session:
        heads = {one.lane: one for one in await ready_heads(two.ledger, session, BASE)}
    outcomes = [Completion(heads[cat.run], WHY), Completion(heads[dog.run], OptimStepped({}))]
    async with two.database.write() as transaction:
        await two.ledger.complete(transaction, outcomes)
    # The replay of a run applies again what was done.
    assert await payloads(two.database) == {kept, sampled}
    unloaded = await cat.step(3)
    async with two.database.write() as transaction:
        await two.ledger.fail_pending(transaction, cat.run, RunUnloaded("unloaded by the test"))
    assert unloaded not in await payloads(two.database)
    assert await payloads(two.database) == {kept, sampled}


async def payloads(database: Database) -> set[str]:
    async with database.read() as session:
        return set((await session.scalars(select(OperationPayload.operation_id))).all())


async def test_what_was_computed_before_the_cancellation_cannot_be_recorded(two: Two) -> None:
    cat, dog = two.cat, two.dog
    await cat.step(1)
    await cat.step(2)
    await dog.step(1)
    async with two.database.read() as session:
        heads = {one.lane: one for one in await ready_heads(two.ledger, session, BASE)}
    computed = {run: Completion(head, OptimStepped({})) for run, head in heads.items()}
    with two.ledger.wakeups.listen(recalls_topic(TRAINER)) as recalled:
        await two.cancel(OfOperation(heads[cat.run].id))
        assert recalled.is_set()
    with pytest.raises(LeaseLost):
        async with two.database.write() as transaction:
            await two.ledger.complete(transaction, [computed[cat.run]])
    async with two.database.write() as transaction:
        await two.ledger.complete(transaction, [computed[dog.run]])
    assert (await cat.next_seq_id(), await dog.next_seq_id()) == (2, 2)
    assert await dog.states() == [OperationState.DONE]


@pytest.mark.parametrize("by", ["session", "tenant", "key", "run", "sampler"])
async def test_a_selection_ends_what_it_names_and_nothing_of_a_neighbour(two: Two, by: str) -> None:
    cat, dog = two.cat, two.dog
    for one in (cat, dog):
        for seq_id in (1, 2):
            await one.step(seq_id)
            await one.sample(seq_id)
        await one.send(one.run, UNLOAD_SEQ_ID, UnloadModel(), OperationKind.UNLOAD_MODEL)
    selection: Selection = {
        "session": OfSession(cat.session),
        "tenant": OfTenant(cat.tenant),
        "key": OfKeys(cat.tenant, [cat.key]),
        "run": OfLane(cat.run),
        "sampler": OfLane(cat.sampler),
    }[by]
    with two.ledger.wakeups.listen(cancelled_samples_topic(BASE)) as event:
        await two.cancel(selection)
        assert event.is_set() == (by != "run")
    failed, pending = OperationState.FAILED, OperationState.PENDING
    steps = pending if by == "sampler" else failed
    samples = pending if by == "run" else failed
    # The unload stays, whatever is selected.
    assert await cat.states() == [steps, samples, steps, samples, pending]
    assert await dog.states() == [pending] * 5
    assert await cat.next_seq_id() == (1 if by == "sampler" else 3)


async def test_only_samples_end_where_only_samples_are_meant(two: Two) -> None:
    await two.cat.step(1)
    sample = await two.cat.sample(1)
    await two.dog.sample(1)
    assert await two.cancel(OfSession(two.cat.session), only_samples=True) == {sample}
    assert await two.cat.states() == [OperationState.PENDING, OperationState.FAILED]
    assert await two.dog.states() == [OperationState.PENDING]


async def test_another_tenants_operation_is_not_ended(two: Two) -> None:
    sample, step = await two.dog.sample(1), await two.dog.step(1)
    assert await two.cancel(OfOperation(sample, two.cat.tenant)) == set()
    assert await two.cancel(OfOperation(step, two.cat.tenant)) == set()
    assert await two.dog.states() == [OperationState.PENDING] * 2


async def test_a_run_whose_creation_is_cancelled_has_failed_for_good(two: Two) -> None:
    cat = two.cat
    async with two.database.write() as transaction:
        new = NewRun(cat.session, 5, BASE, LoraSettings(4, seed=1), None)
        run = await create_run(transaction, cat.tenant, new, utc_now)
    payload = CreateModel(BASE, LoraSettings(4))
    creation = await cat.send(run, 0, payload, OperationKind.CREATE_MODEL)
    after = await cat.send(run, 1, OptimStep(), OperationKind.OPTIM_STEP)
    assert await two.cancel(OfOperation(creation)) == {creation, after}
    async with two.database.read() as session:
        assert await session.scalar(select(Run.state).where(Run.id == run)) == RunState.FAILED
    status = await two.ledger.status(cat.tenant, after)
    assert (status.error_code, status.error_message) == (
        "run_unloaded",
        "the model was never made: cancelled by the test",
    )


async def test_training_that_was_cancelled_counts_no_tokens_before_and_after_pruning(two: Two) -> None:
    """Budgets say so too. A neighbour's that was done counts, and so does what the tenant had done before."""
    since = utc_now().date() - timedelta(days=1)
    for one in (two.cat, two.dog):
        async with two.database.write() as transaction:
            await set_budget(transaction, one.tenant, BudgetName(Period.TOTAL), 10**6, utc_now())
        await one.train(1, tokens=10)
    async with two.database.read() as session:
        heads = {one.lane: one for one in await ready_heads(two.ledger, session, BASE)}
    async with two.database.write() as transaction:
        await two.ledger.complete(transaction, [Completion(one, OptimStepped({})) for one in heads.values()])
        run = await create_run(
            transaction, two.cat.tenant, NewRun(two.cat.session, 5, BASE, LoraSettings(4, seed=1), None), utc_now
        )
    await two.cat.send(run, 0, CreateModel(BASE, LoraSettings(4)), OperationKind.CREATE_MODEL)
    cancelled = [await two.cat.train(2, tokens=1000), await two.cat.train(1, tokens=500, run=run)]
    assert set(cancelled) < await two.cancel(OfTenant(two.cat.tenant))
    for _ in range(2):
        async with two.database.read() as session:
            assert {line.tenant: line.tokens for line in await usage(session, since=since)} == {"cat": 10, "dog": 10}
            for one in (two.cat, two.dog):
                spent = [found.spent for found in await budgets_of(session, one.tenant, utc_now())]
                assert (spent, await tokens_since(session, one.tenant, datetime.min.replace(tzinfo=UTC))) == ([10], 10)
            kept = await session.scalars(select(Operation.tokens).where(Operation.id.in_(cancelled)))
            assert kept.all() == [0, 0]
        async with two.database.write() as transaction:
            await prune(transaction, finished_before=utc_now() + timedelta(hours=1), now=utc_now())


@pytest.mark.parametrize("why", [WHY, client_silent()], ids=lambda error: error.code)
async def test_tokens_that_a_cancelled_sample_had_drawn_are_counted_once(two: Two, why: Cancelled) -> None:
    began, also, waited = [await two.cat.sample(number) for number in (1, 2, 3)]
    async with two.database.write() as transaction:
        operations = await two.ledger.load(transaction, [began, also, waited])
    await two.cancel(OfTenant(two.cat.tenant), why)
    drawn = SampledSequence("length", np.array([5, 6], np.int32), np.zeros(2, np.float32), None)
    nothing = SampledSequence("length", np.array([], np.int32), np.zeros(0, np.float32), None)
    for _ in range(2):
        ends = [
            Completion(one, SampleOutput([part])) for one, part in zip(operations, (drawn, drawn, nothing), strict=True)
        ]
        async with two.database.write() as transaction:
            await two.ledger.complete(transaction, ends)
    async with two.database.read() as session:
        (line,) = await usage(session, since=utc_now().date() - timedelta(days=1))
        made = await session.scalar(select(Operation.result_bytes).where(Operation.id == began))
    assert (line.tenant, line.operations, line.tokens, made) == ("cat", 0, 2 * (3 + 2), None)


async def test_cached_tokens_of_a_cancelled_sample_cost_what_those_of_a_whole_one_do(two: Two) -> None:
    """Usage and the budget in money agree, before and after pruning, and so do those of a neighbour whose sample ended."""
    rates = {
        PricedQuantity.PROMPT_TOKENS: "1000000",
        PricedQuantity.CACHED_PROMPT_TOKENS: "10000",
        PricedQuantity.SAMPLED_TOKENS: "0",
    }
    now = utc_now()
    async with two.database.write() as transaction:
        for meter, amount in rates.items():
            await add_price(transaction, NewPrice(meter, amount, "USD"), utc_now)
        for one in (two.cat, two.dog):
            name = BudgetName(Period.TOTAL, currency="USD")
            await set_budget(transaction, one.tenant, name, Decimal(100), now)
    ids = [await two.cat.sample(1), await two.dog.sample(1)]
    async with two.database.read() as session:
        operations = await two.ledger.load(session, ids)
    await two.cancel(OfTenant(two.cat.tenant))
    drawn = SampledSequence("length", np.array([5, 6], np.int32), np.zeros(2, np.float32), None)
    for _ in range(2):
        async with two.database.write() as transaction:
            ends = [Completion(one, SampleOutput([drawn], prompt_cache_hit_tokens=2)) for one in operations]
            await two.ledger.complete(transaction, ends)
    window = {"since": now - timedelta(days=1), "before": None, "by": (), "width": BucketWidth.DAY}
    for _ in range(2):
        for one in (two.cat, two.dog):
            async with two.database.read() as session:
                (line,) = (await priced_page(session, one.tenant, **window, limit=9)).lines
                (budget,) = await budgets_of(session, one.tenant, now)
            assert (line.line.prompt_tokens, line.line.cached_prompt_tokens, line.line.sampled_tokens) == (3, 2, 2)
            assert line.cost == budget.spent == Decimal("1.02")
        async with two.database.write() as transaction:
            await prune(transaction, finished_before=now + timedelta(hours=1), now=now)
