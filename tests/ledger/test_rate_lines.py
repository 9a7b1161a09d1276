"""Rates of keys and projects are lines of their own: exact over several API processes, and none holds up what is not in it."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from operator import itemgetter

import numpy as np
import pytest
import pytest_asyncio
from sqlalchemy import select, update

from contracts.errors import Cancelled, EngineFailure, OverRate
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import Completion, NewOperation
from contracts.operations import SampledSequence, SampleOutput
from contracts.rate_lines import RateLine, RateScope
from contracts.waiting import WaitReason
from ledger.cancellation import OfOperation
from ledger.pruning import prune
from ledger.sample_claims import waiting_samples
from store.clock import utc_now
from store.tables import ApiKey, Operation, RateLineRow, RatePlace
from tenants.keys import create_key, forget_ended_keys, revoke_key, rotate_key, set_key_limits
from tenants.limits import limits_of, set_tenant
from tenants.rate_holds import holds_of
from tenants.rate_lines import line_states, set_line_paces
from tenants.rates import Meter
from tenants.rights import KeyRights
from tests.ledger.api_processes import BASE, DEFAULTS, Process, ready_run, sample, tenant
from tests.ledger.test_rates import TOKENS, batch, rate_of, send_thrice
from tests.ledger_heads import TRAINER, pending_samples, ready_heads

A_MINUTE, BURST = 600, 300
RATES = {
    f"{meter}_tokens_{part}": value for meter in Meter for part, value in (("per_minute", A_MINUTE), ("burst", BURST))
}
DRAWN = SampleOutput([SampledSequence("stop", np.zeros(6, np.int32), np.zeros(6, np.float32))])
PROMPT = 4
"""Tokens of each sample's prompt."""


def line_of(owner: TenantId, scope: RateScope, name: str, meter: Meter) -> RateLine:
    return RateLine(owner, scope, name, meter)


@pytest_asyncio.fixture
async def cats(processes: list[Process]) -> TenantId:
    """A tenant without a rate, whose keys 1 and 2 and project ``p`` have rates of 600 tokens a minute with a burst of 300."""
    owner = await tenant(processes, "cats")
    async with processes[0].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"pending_samples": 10_000, "pending_operations": None})
        for scope, name in ((RateScope.KEY, "1"), (RateScope.KEY, "2"), (RateScope.PROJECT, "p")):
            await set_line_paces(transaction, owner, scope, name, RATES, utc_now())
    return owner


async def charged(one: Process, line: RateLine) -> tuple[int, int]:
    """Tokens that the line was charged, and those of them that went back."""
    async with one.database.read() as session:
        of = (
            RateLineRow.tenant_id == line.tenant,
            RateLineRow.scope_id == line.scope_id,
            RateLineRow.meter == line.meter,
        )
        row = (await session.scalars(select(RateLineRow).where(*of))).one()
        return row.charged, row.returned


async def marks(one: Process, line: RateLine) -> list[int]:
    async with one.database.read() as session:
        of = (
            RateLineRow.tenant_id == line.tenant,
            RateLineRow.scope_id == line.scope_id,
            RateLineRow.meter == line.meter,
        )
        query = select(RatePlace.mark).join(RateLineRow, RateLineRow.id == RatePlace.line_id).where(*of)
        return sorted(await session.scalars(query))


async def free_and_next(one: Process, of_each: int = 1000) -> tuple[dict[str, set[str]], float]:
    """Ids of the waiting samples that no line holds, by tenant, and the seconds until the next held one may run."""
    async with one.database.read() as session:
        waiting = await waiting_samples(session, BASE, of_each=of_each, now=utc_now())
    return {owner: {found.id for found in samples} for owner, samples in waiting.of.items()}, waiting.seconds_to_lines


async def complete(one: Process, ids: Sequence[str], outcome: object) -> None:
    async with one.database.write() as transaction:
        ready = await one.ledger.load(transaction, [RequestId(one_id) for one_id in ids])
        await one.ledger.complete(transaction, [Completion(op, outcome) for op in ready])  # type: ignore[arg-type]


async def seconds_held(one: Process, ids: Sequence[str]) -> list[float]:
    now = utc_now()
    async with one.database.read() as session:
        holds = await holds_of(session, list(ids), now)
    return [(holds[RequestId(name)].until - now).total_seconds() if name in holds else 0.0 for name in ids]  # type: ignore[operator]


async def starts(one: Process, ids: Sequence[str]) -> list[float]:
    """Return the seconds on the clock when each may run, 0 for at once. They do not fall while the machine stands still."""
    async with one.database.read() as session:
        holds = await holds_of(session, list(ids), utc_now())
    return [holds[RequestId(name)].until.timestamp() if name in holds else 0.0 for name in ids]  # type: ignore[union-attr]


@pytest.mark.parametrize("with_tenants", [False, True])
async def test_training_sent_thrice_to_three_processes_is_charged_once_in_each_line(
    processes: list[Process], cats: TenantId, *, with_tenants: bool
) -> None:
    if with_tenants:
        async with processes[0].database.write() as transaction:
            await set_tenant(transaction, name="cats", limits={"train_tokens_per_minute": 60})
    dogs = await tenant(processes, "dogs")
    mine, theirs = await ready_run(processes[0], cats), await ready_run(processes[0], dogs)
    key = line_of(cats, RateScope.KEY, "1", Meter.TRAIN)
    project = line_of(cats, RateScope.PROJECT, "p", Meter.TRAIN)
    # The first half is the key's and the project's, the second the project's alone.
    sent = [
        replace(batch(cats, mine, seq_id), lines=(key, project) if seq_id <= 10 else (project,))
        for seq_id in range(1, 21)
    ]
    await send_thrice(processes, [*sent, *(batch(dogs, theirs, seq_id) for seq_id in range(1, 21))])
    assert await charged(processes[0], key) == (10 * TOKENS, 0)
    assert await charged(processes[0], project) == (20 * TOKENS, 0)
    # Each has a place of its own in each line, without a gap.
    assert await marks(processes[0], key) == [TOKENS * place for place in range(10)]
    assert await marks(processes[0], project) == [TOKENS * place for place in range(20)]
    of_tenant = await rate_of(processes[0], cats, "train")
    assert (of_tenant.charged if of_tenant else None) == (20 * TOKENS if with_tenants else None)
    assert await charged(processes[0], line_of(cats, RateScope.KEY, "2", Meter.TRAIN)) == (0, 0)
    assert await rate_of(processes[0], dogs, "train") is None


async def test_training_runs_once_each_of_its_lines_lets_it_and_other_keys_work_runs_at_once(
    processes: list[Process], cats: TenantId
) -> None:
    one, key = processes[0], line_of(cats, RateScope.KEY, "1", Meter.TRAIN)
    project = line_of(cats, RateScope.PROJECT, "p", Meter.TRAIN)
    first, second = await ready_run(one, cats), await ready_run(one, cats)
    async with one.database.write() as transaction:
        await set_line_paces(transaction, cats, RateScope.PROJECT, "p", {**RATES, "train_tokens_burst": 100}, utc_now())
    for seq_id in range(1, 7):
        lines = (key, project) if seq_id == 6 else (key,)
        await send_thrice(processes, [replace(batch(cats, first, seq_id), lines=lines), batch(cats, second, seq_id)])
    for seq_id in range(7, 12):
        await send_thrice(processes, [replace(batch(cats, first, seq_id), lines=(project,))])
    async with one.database.read() as session:
        await ready_heads(one.ledger, session, BASE)
        found = await one.ledger.pending_training(session, BASE, trainer=TRAINER, after_position=0)
    assert not any(op.starts_at for op in found if op.run == second)
    waits = [bool(op.starts_at) for op in found if op.run == first]
    # The key lets 300 tokens run, the project 100, which the sixth has taken though the key holds it.
    assert waits == [False] * 3 + [True] * 8
    starts = {op.seq_id: op.starts_at for op in found if op.run == first and op.starts_at}
    assert starts[6] - starts[4] == pytest.approx(20, abs=0.5)
    assert starts[7] < starts[6]
    (last,) = [op.id for op in found if op.run == first and op.seq_id == 11]
    async with one.database.read() as session:
        told = (await holds_of(session, [last], utc_now()))[last]
    assert told.reason is WaitReason.RATE_LIMIT
    assert "the rate of this project of 600 tokens of training a minute" in told.told


async def test_a_keys_flood_of_samples_stands_before_no_other_keys(processes: list[Process], cats: TenantId) -> None:
    dogs = await tenant(processes, "dogs")
    key, other = (line_of(cats, RateScope.KEY, name, Meter.SAMPLE) for name in ("1", "2"))
    flood = [replace(sample(cats, seq_id, max_tokens=96), lines=(key,)) for seq_id in range(60)]
    await send_thrice(processes, flood)
    late = replace(sample(cats, 60, max_tokens=96), lines=(other,))
    free, theirs = sample(cats, 61, max_tokens=96), sample(dogs, 0, max_tokens=96)
    for one in (late, free, theirs):
        await processes[1].samples.accept(one)
    assert await charged(processes[0], key) == (6000, 0)
    assert await marks(processes[0], key) == [100 * place for place in range(60)]
    found, seconds = await free_and_next(processes[2], of_each=5)
    assert len(found[cats] - {late.id, free.id}) == 3
    assert {late.id, free.id} <= found[cats]
    assert found[dogs] == {theirs.id}
    assert 0 < seconds <= 10


async def test_what_a_sample_did_not_take_goes_back_to_each_line_once(processes: list[Process], cats: TenantId) -> None:
    one = processes[0]
    lines = (line_of(cats, RateScope.KEY, "1", Meter.SAMPLE), line_of(cats, RateScope.PROJECT, "p", Meter.SAMPLE))
    sent = [replace(sample(cats, seq_id, max_tokens=96), lines=lines, tokens=PROMPT) for seq_id in range(8)]
    for new in sent:
        await one.samples.accept(new)
    async with one.database.read() as session:
        ids = [op.id for op in await pending_samples(one.ledger, session, BASE)]
    before = await starts(one, [sent[7].id])
    # Done twice, as by a process whose answer was lost.
    await asyncio.gather(complete(processes[1], ids[:1], DRAWN), complete(processes[2], ids[:1], DRAWN))
    await complete(one, ids[1:2], EngineFailure("broken"))
    for line in lines:
        assert await charged(one, line) == (800, 200 - PROMPT - 6)
    after = await starts(one, [sent[7].id])
    assert before[0] - after[0] == pytest.approx((200 - PROMPT - 6) / 10, abs=1)


async def test_a_cancelled_one_leaves_each_line_and_is_charged_what_it_drew(
    processes: list[Process], cats: TenantId
) -> None:
    one = processes[0]
    lines = (line_of(cats, RateScope.KEY, "1", Meter.SAMPLE), line_of(cats, RateScope.PROJECT, "p", Meter.SAMPLE))
    sent = [replace(sample(cats, seq_id, max_tokens=96), lines=lines, tokens=PROMPT) for seq_id in range(10)]
    alone = replace(sample(cats, 10, max_tokens=96), lines=lines[:1])
    for new in (*sent, alone):
        await one.samples.accept(new)
    ids = [new.id for new in (*sent, alone)]
    before = await starts(one, ids)
    async with one.database.write() as transaction:
        ready = await one.ledger.load(transaction, [sent[6].id])

    # At once, by two processes: each closes its own gap.
    async def cancel(process: Process, place: int) -> None:
        async with process.database.write() as transaction:
            which = OfOperation(sent[place].id)
            await process.ledger.cancel(transaction, which, Cancelled("cancelled"), only_samples=True)

    await asyncio.gather(cancel(processes[1], 4), cancel(processes[2], 6))
    after = await starts(one, ids)
    assert after[3] == pytest.approx(before[3], abs=1)
    assert after[5] == pytest.approx(before[5] - 10, abs=1)
    assert after[9] == pytest.approx(before[9] - 20, abs=1)
    assert after[10] == pytest.approx(before[10] - 20, abs=1)
    assert await charged(one, lines[0]) == (900, 0)
    assert await charged(one, lines[1]) == (800, 0)
    async with one.database.write() as transaction:
        await one.ledger.complete(transaction, [Completion(ready[0], DRAWN)])
    assert await charged(one, lines[0]) == (900, -(PROMPT + 6))


async def test_a_changed_rate_holds_for_what_waits_and_one_taken_away_holds_nothing(
    processes: list[Process], cats: TenantId
) -> None:
    one, line = processes[0], line_of(cats, RateScope.KEY, "1", Meter.SAMPLE)
    other = line_of(cats, RateScope.KEY, "2", Meter.SAMPLE)
    sent = [replace(sample(cats, seq_id, max_tokens=96), lines=(line,)) for seq_id in range(10)]
    theirs = [replace(sample(cats, seq_id, max_tokens=96), lines=(other,)) for seq_id in range(10, 20)]
    for new in (*sent, *theirs):
        await one.samples.accept(new)

    async def given(**limits: int) -> list[float]:
        async with processes[1].database.write() as transaction:
            await set_line_paces(transaction, cats, RateScope.KEY, "1", limits, utc_now())
        return await seconds_held(processes[2], [sent[9].id, theirs[9].id])

    assert await seconds_held(one, [sent[9].id, theirs[9].id]) == [pytest.approx(60, abs=10)] * 2
    tenfold = await given(sample_tokens_per_minute=6000, sample_tokens_burst=300)
    assert 0 < tenfold[0] <= 7 < 40 < tenfold[1] <= 70
    nothing, other_keys = await given()
    assert nothing == 0.0 < 20 < other_keys <= 70
    # Nor is anything left of the old debt once there is a rate again, nor charged by a request that knows of none.
    assert (await given(sample_tokens_per_minute=1))[0] == 0.0
    await given()
    new = replace(sample(cats, 30, max_tokens=96), lines=(line,))
    await one.samples.accept(new)
    assert await seconds_held(one, [new.id]) == [0.0]


async def test_a_sample_that_may_not_wait_is_refused_by_its_projects_rate_alone(
    processes: list[Process], cats: TenantId
) -> None:
    one, project = processes[0], line_of(cats, RateScope.PROJECT, "p", Meter.SAMPLE)
    asked = [replace(sample(cats, seq_id, max_tokens=96), lines=(project,), may_wait=False) for seq_id in range(5)]
    asked += [replace(sample(cats, seq_id, max_tokens=96), may_wait=False) for seq_id in range(5, 8)]
    done = await asyncio.gather(*(one.samples.accept_rated(new) for new in asked), return_exceptions=True)
    assert [isinstance(answer, OverRate) for answer in done] == [False] * 3 + [True] * 2 + [False] * 3
    refused = done[3]
    assert isinstance(refused, OverRate)
    assert "the rate of this project of 600 tokens a minute" in refused.message
    assert await charged(one, project) == (300, 0)


async def test_no_line_lets_more_through_than_its_rate_and_each_operation_runs_some_time(
    processes: list[Process], cats: TenantId
) -> None:
    chance, one, now = random.Random(7), processes[0], utc_now()
    names = [(RateScope.KEY, "1"), (RateScope.KEY, "2"), (RateScope.PROJECT, "p"), (RateScope.PROJECT, "q")]
    paces = {name: (chance.randint(60, 6000), chance.randint(20, 500)) for _, name in names}
    async with one.database.write() as transaction:
        for scope, name in names:
            a_minute, burst = paces[name]
            limits = {"sample_tokens_per_minute": a_minute, "sample_tokens_burst": burst}
            await set_line_paces(transaction, cats, scope, name, limits, now)
    lines = {name: line_of(cats, scope, name, Meter.SAMPLE) for scope, name in names}
    sent = []
    for seq_id in range(80):
        stands = tuple(lines[name] for name in chance.sample(sorted(lines), chance.randint(1, 3)))
        sent.append(replace(sample(cats, seq_id, max_tokens=chance.randint(1, 120)), lines=stands))
    await send_thrice(processes, sent)
    async with one.database.read() as session:
        found = await session.execute(select(Operation.id, Operation.seq_id).where(Operation.tenant_id == cats))
        of = {row.id: sent[row.seq_id] for row in found}
    gone = chance.sample(sorted(of), 15)
    async with one.database.write() as transaction:
        for one_of_them in gone:
            which = OfOperation(RequestId(one_of_them))
            await one.ledger.cancel(transaction, which, Cancelled("cancelled"), only_samples=True)
    rows = sorted(set(of) - set(gone))
    begun, ends = (utc_now() - now).total_seconds(), await seconds_held(one, rows)
    for name, line in lines.items():
        a_minute, burst = paces[name]
        inside = [(end, of[row]) for end, row in zip(ends, rows, strict=True) if line in of[row].lines]
        let, largest = 0, 0
        for end, new in sorted(inside, key=itemgetter(0)):
            cost = new.demand.tokens if new.demand else 0
            let, largest = let + cost, max(largest, cost)
            assert let <= burst + largest + (begun + end) * a_minute / 60 + 1


async def test_keys_that_take_each_others_place_share_one_line_until_the_last_is_forgotten(
    processes: list[Process], cats: TenantId
) -> None:
    one, now = processes[0], utc_now()
    async with one.database.write() as transaction:
        made = await create_key(
            transaction, tenant=cats, note="", clock=utc_now, rights=KeyRights(limits={"sample_tokens_per_minute": 60})
        )
        beside = await create_key(
            transaction, tenant=cats, note="", clock=utc_now, rights=KeyRights(limits={"sample_tokens_per_minute": 6})
        )
        old = await transaction.get_one(ApiKey, made.id)
        rotated = await rotate_key(transaction, old, grace=timedelta(hours=1), clock=utc_now)
        await set_key_limits(
            transaction, await transaction.get_one(ApiKey, rotated.id), {"sample_tokens_per_minute": 120}, utc_now
        )
    lines = [line_of(cats, RateScope.KEY, str(key.id), Meter.SAMPLE) for key in (made, rotated, beside)]

    async def standing() -> list[int | None]:
        async with processes[1].database.read() as session:
            states = await line_states(session, lines)
        return [round(states[line].pace.per_second * 60) if line in states else None for line in lines]

    assert await standing() == [120, None, 6]
    async with one.database.write() as transaction:
        own = await transaction.scalars(select(ApiKey.limits).where(ApiKey.id.in_([made.id, rotated.id])))
        assert list(own) == [{"sample_tokens_per_minute": 120}] * 2
        # The newest key is never forgotten.
        await create_key(transaction, tenant=cats, note="", clock=utc_now)
        await revoke_key(transaction, prefix=made.prefix, clock=utc_now)
        await transaction.execute(update(ApiKey).where(ApiKey.id == made.id).values(revoked_at=now - timedelta(days=2)))
        assert await forget_ended_keys(transaction, now - timedelta(days=1), most=10) == 1
    assert await standing() == [120, None, 6]
    async with one.database.write() as transaction:
        await transaction.execute(
            update(ApiKey).where(ApiKey.id == rotated.id).values(revoked_at=now - timedelta(days=2))
        )
        assert await forget_ended_keys(transaction, now - timedelta(days=1), most=10) == 1
    assert await standing() == [None, None, 6]


async def test_places_go_with_the_results_of_their_operations(processes: list[Process], cats: TenantId) -> None:
    one, line = processes[0], line_of(cats, RateScope.KEY, "1", Meter.SAMPLE)
    sent = [replace(sample(cats, seq_id), lines=(line,)) for seq_id in range(2)]
    for new in sent:
        await one.samples.accept(new)
    await complete(one, [sent[0].id], DRAWN)
    async with one.database.write() as transaction:
        assert await prune(transaction, finished_before=utc_now() + timedelta(seconds=1), now=utc_now()) == 1
        assert list(await transaction.scalars(select(RatePlace.operation_id))) == [sent[1].id]


async def test_a_repeat_after_the_limit_is_known_charges_nothing(processes: list[Process], cats: TenantId) -> None:
    """A repeat that comes while the tenant is near its limits, where requests are accepted one after another."""
    one, line = processes[0], line_of(cats, RateScope.KEY, "1", Meter.TRAIN)
    async with one.database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"pending_operations": 3})
    run = await ready_run(one, cats)
    async with one.database.read() as session:
        limits = await limits_of(session, cats, DEFAULTS)
    new: NewOperation = replace(batch(cats, run, 1), lines=(line,))
    first = await one.training.accept(new, limits)
    repeats = [replace(new, id=RequestId(f"{place}-{new.id}"[:36])) for place in range(4)]
    asked = zip([*processes, one], repeats, strict=True)
    answers = await asyncio.gather(*(process.training.accept(again, limits) for process, again in asked))
    assert set(answers) == {first}
    assert await charged(one, line) == (TOKENS, 0)


async def test_a_line_that_was_idle_lets_no_more_than_its_burst_run_at_once(
    processes: list[Process], cats: TenantId
) -> None:
    one, run = processes[0], await ready_run(processes[0], cats)
    async with one.database.write() as transaction:
        await transaction.execute(update(RateLineRow).values(tat=RateLineRow.tat - 3600))
    async with one.database.read() as session:
        limits = await limits_of(session, cats, DEFAULTS)
    drawn, trained = (line_of(cats, RateScope.KEY, "1", meter) for meter in (Meter.SAMPLE, Meter.TRAIN))
    samples = [replace(sample(cats, seq_id, max_tokens=96), lines=(drawn,)) for seq_id in range(4)]
    passes = [replace(batch(cats, run, seq_id), lines=(trained,)) for seq_id in range(1, 5)]
    for new in samples:
        await one.samples.accept(new)
    for new in passes:
        await one.training.accept(new, limits)
    held = [bool(seconds) for seconds in await seconds_held(one, [new.id for new in (*samples, *passes)])]
    assert held == [False, False, False, True] * 2
