"""Rates and budgets are exact while several API processes accept and end work at once, each with its own connections."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest
import pytest_asyncio
from sqlalchemy import select, text

from contracts.errors import Cancelled, EngineFailure
from contracts.ids import RunId, TenantId
from contracts.ledger_records import Completion, NewOperation, ReadyOperation
from contracts.operations import ForwardBackwardOutput, OperationKind, SampledSequence, SampleOutput
from contracts.waiting import WaitReason
from ledger.cancellation import OfOperation
from ledger.sample_claims import MOST_TENANTS, waiting_samples
from store.clock import utc_now
from store.tables import Operation, Rate
from tenants.budget_settings import BudgetName, alerts_of, budgets_of, set_budget
from tenants.budgets import Period
from tenants.limits import Counted, hold_count, limits_of, set_tenant
from tenants.prices import PricedQuantity
from tenants.rate_holds import holds_of
from tenants.rates import Meter, charge
from tenants.spending import Spender, Spending, spend
from tenants.tenant_names import create_tenant
from tests.ledger.api_processes import BASE, DEFAULTS, PROCESSES, Process, ready_run, sample, step, tenant
from tests.ledger_heads import TRAINER, pending_samples, ready_heads

TOKENS = 100
LIMITS = {
    "train_tokens_per_minute": 600,
    "train_tokens_burst": 300,
    "sample_tokens_per_minute": 600,
    "sample_tokens_burst": 300,
    "pending_operations": None,
    "pending_samples": None,
}
DONE = ForwardBackwardOutput([np.zeros(3, np.float32)], {"loss:sum": 1.0})


@pytest_asyncio.fixture
async def limited(processes: list[Process]) -> list[Process]:
    """The processes; ``cats`` have rates of 600 tokens a minute with a burst of 300, ``dogs`` have none."""
    async with processes[0].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits=LIMITS)
    return processes


def batch(owner: TenantId, run: RunId, seq_id: int) -> NewOperation:
    """A pass of 100 tokens."""
    return replace(step(owner, run, seq_id), kind=OperationKind.FORWARD_BACKWARD, tokens=TOKENS)


def used(owner: TenantId, tokens: int) -> Spending:
    """Use of that many trained tokens."""
    return Spending(Spender(owner, None), BASE, utc_now(), {PricedQuantity.TRAIN_TOKENS: tokens})


async def send_thrice(processes: Sequence[Process], operations: Sequence[NewOperation]) -> None:
    """Have each operation accepted three times, in another order each time, by the processes in turn."""
    sent = [one for _ in range(3) for one in random.sample(operations, len(operations))]
    # Another request of the same content has an id of its own.
    sent = [replace(one, id=f"{place}-{one.id}"[:36]) for place, one in enumerate(sent)]  # type: ignore[arg-type]
    asked = []
    for place, one in enumerate(sent):
        accepting = processes[place % PROCESSES]
        if one.kind is OperationKind.SAMPLE:
            asked.append(accepting.samples.accept(one))
        else:
            async with accepting.database.read() as session:
                limits = await limits_of(session, one.tenant, DEFAULTS)
            asked.append(accepting.training.accept(one, limits))
    await asyncio.gather(*asked)


async def rate_of(one: Process, owner: TenantId, meter: str) -> Rate | None:
    async with one.database.read() as session:
        return await session.scalar(select(Rate).where(Rate.tenant_id == owner, Rate.meter == meter))


async def marks(one: Process, owner: TenantId, kind: OperationKind) -> list[int | None]:
    async with one.database.read() as session:
        query = select(Operation.rate_mark).where(Operation.tenant_id == owner, Operation.kind == kind)
        return list(await session.scalars(query.order_by(Operation.rate_mark)))


async def complete(one: Process, ended: Sequence[tuple[ReadyOperation, object]]) -> None:
    async with one.database.write() as transaction:
        await one.ledger.complete(transaction, [Completion(*pair) for pair in ended])  # type: ignore[arg-type]


async def test_training_sent_thrice_to_three_processes_is_charged_once(limited: list[Process]) -> None:
    cats, dogs = await tenant(limited, "cats"), await tenant(limited, "dogs")
    mine, theirs = await ready_run(limited[0], cats), await ready_run(limited[0], dogs)
    many = [batch(cats, mine, seq_id) for seq_id in range(1, 21)]
    await send_thrice(limited, [*many, *(batch(dogs, theirs, seq_id) for seq_id in range(1, 21))])
    charged = await rate_of(limited[0], cats, "train")
    assert charged is not None
    assert (charged.charged, charged.returned) == (20 * TOKENS, 0)
    # Each has a place of its own in the line, without a gap.
    assert await marks(limited[0], cats, OperationKind.FORWARD_BACKWARD) == [TOKENS * place for place in range(20)]
    assert await rate_of(limited[0], dogs, "train") is None
    assert await marks(limited[0], dogs, OperationKind.FORWARD_BACKWARD) == [None] * 20


async def test_training_over_the_rate_is_accepted_and_waits_in_line(limited: list[Process]) -> None:
    cats, dogs = await tenant(limited, "cats"), await tenant(limited, "dogs")
    mine, theirs = await ready_run(limited[0], cats), await ready_run(limited[0], dogs)
    one = limited[0]
    for seq_id in range(1, 7):
        await send_thrice(limited, [batch(cats, mine, seq_id), batch(dogs, theirs, seq_id)])
    async with one.database.read() as session:
        await ready_heads(one.ledger, session, BASE)
        found = await one.ledger.pending_training(session, BASE, trainer=TRAINER, after_position=0)
    waits = {owner: [bool(op.starts_at) for op in found if op.tenant == owner] for owner in (cats, dogs)}
    # The burst lets 300 tokens run at once.
    assert waits == {cats: [False] * 3 + [True] * 3, dogs: [False] * 6}
    held = [op.starts_at for op in found if op.tenant == cats][3:]
    assert held[1] - held[0] == pytest.approx(10, abs=0.5)
    assert held[2] - held[1] == pytest.approx(10, abs=0.5)
    last = next(op for op in found if op.tenant == cats and op.seq_id == 6)
    async with one.database.read() as session:
        told = (await holds_of(session, [last.id], utc_now()))[last.id]
    assert told.reason is WaitReason.RATE_LIMIT
    assert "your rate of 600 tokens of training a minute" in told.told
    assert 15 < (told.until - utc_now()).total_seconds() <= 30  # type: ignore[operator]


async def test_samples_sent_thrice_are_charged_once_and_what_they_do_not_take_goes_back(limited: list[Process]) -> None:
    cats, dogs = await tenant(limited, "cats"), await tenant(limited, "dogs")
    # Each may take 4 + 96 tokens.
    many = [sample(cats, seq_id, max_tokens=96) for seq_id in range(20)]
    await send_thrice(limited, [*many, *(sample(dogs, seq_id, max_tokens=96) for seq_id in range(20))])
    one = limited[0]
    charged = await rate_of(one, cats, "sample")
    assert charged is not None
    assert (charged.charged, charged.returned) == (2000, 0)
    assert await marks(one, cats, OperationKind.SAMPLE) == [100 * place for place in range(20)]
    async with one.database.read() as session:
        waiting = (await waiting_samples(session, BASE, of_each=30, now=utc_now())).of
        ready = [op for op in await pending_samples(one.ledger, session, BASE) if op.tenant == cats]
    assert [bool(op.seconds) for op in waiting[cats]] == [False] * 3 + [True] * 17
    assert not any(op.seconds for op in waiting[dogs])
    drawn = SampleOutput([SampledSequence("stop", np.zeros(6, np.int32), np.zeros(6, np.float32))])
    # Done twice, as by a process whose answer was lost: the second finds it final.
    for _ in range(2):
        await asyncio.gather(complete(limited[1], [(ready[0], drawn)]), complete(limited[2], [(ready[1], drawn)]))
    await complete(one, [(ready[2], EngineFailure("broken"))])
    after = await rate_of(one, cats, "sample")
    assert after is not None
    prompt = ready[0].tokens
    assert after.charged - after.returned == 17 * 100 + 2 * (prompt + 6)
    async with one.database.read() as session:
        waiting = (await waiting_samples(session, BASE, of_each=30, now=utc_now())).of
    # 300 tokens came back but for those that two samples took.
    assert [bool(op.seconds) for op in waiting[cats]][:2] == [False, False]
    assert waiting[cats][-1].seconds > 0


async def test_a_cancelled_one_leaves_the_line_and_those_before_it_run_no_earlier(limited: list[Process]) -> None:
    cats = await tenant(limited, "cats")
    one = limited[0]
    ids = [await one.samples.accept(sample(cats, seq_id, max_tokens=96)) for seq_id in range(10)]

    async def starts() -> dict[str, float]:
        now = utc_now()
        async with one.database.read() as session:
            waiting = (await waiting_samples(session, BASE, of_each=30, now=now)).of
        return {op.id: now.timestamp() + op.seconds for op in waiting.get(cats, [])}

    before = await starts()
    async with one.database.write() as transaction:
        await one.ledger.cancel(transaction, OfOperation(ids[6]), Cancelled("cancelled"), only_samples=True)
    after = await starts()
    assert after[ids[5]] == pytest.approx(before[ids[5]], abs=1)
    assert after[ids[9]] == pytest.approx(before[ids[9]] - 10, abs=1)
    charged = await rate_of(one, cats, "sample")
    assert charged is not None
    assert charged.charged - charged.returned == 900


async def test_cancelled_training_gives_back_all_that_it_was_charged(limited: list[Process]) -> None:
    cats = await tenant(limited, "cats")
    one = limited[0]
    run = await ready_run(one, cats)
    async with one.database.read() as session:
        limits = await limits_of(session, cats, DEFAULTS)
    ids = [await one.training.accept(batch(cats, run, seq_id), limits) for seq_id in range(1, 5)]
    async with one.database.write() as transaction:
        await one.ledger.cancel(transaction, OfOperation(ids[1]), Cancelled("cancelled"))
    charged = await rate_of(one, cats, "train")
    assert charged is not None
    assert charged.charged - charged.returned == 3 * TOKENS
    waiting = [mark for mark in await marks(one, cats, OperationKind.FORWARD_BACKWARD) if mark is not None]
    assert sorted({*waiting}) == [0, TOKENS, 2 * TOKENS], "those behind it move up"


async def test_a_raised_rate_lets_waiting_work_run_and_without_one_nothing_waits(limited: list[Process]) -> None:
    cats = await tenant(limited, "cats")
    one = limited[0]
    for seq_id in range(10):
        await one.samples.accept(sample(cats, seq_id, max_tokens=96))

    async def longest() -> float:
        async with limited[1].database.read() as session:
            waiting = (await waiting_samples(session, BASE, of_each=30, now=utc_now())).of
        return max(op.seconds for op in waiting[cats])

    # 700 tokens too many.
    assert 7 < await longest() <= 70
    async with limited[2].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"sample_tokens_per_minute": 6000})
    assert 0 < await longest() <= 7
    async with limited[2].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"sample_tokens_per_minute": None})
    assert await longest() == 0
    # Nor is anything left of the old debt once there is a rate again.
    async with limited[2].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"sample_tokens_per_minute": 6_000_000})
    assert await longest() == 0


async def test_a_clock_that_is_behind_takes_no_period_back(processes: list[Process]) -> None:
    cats, now = await tenant(processes, "cats"), utc_now()
    tomorrow = Period.DAY.end(now)
    assert tomorrow is not None
    async with processes[0].database.write() as transaction:
        await set_budget(transaction, cats, BudgetName(Period.DAY), 100, now)
        await spend(transaction, [used(cats, 40)], now)
        await spend(transaction, [used(cats, 30)], tomorrow)
        await spend(transaction, [used(cats, 30)], now)
        await spend(transaction, [used(cats, 30)], tomorrow)
    async with processes[0].database.read() as session:
        assert [one.spent for one in await budgets_of(session, cats, tomorrow)] == [90]


async def test_a_spent_budget_holds_passes_and_creations_and_lets_steps_and_saves_go_on(
    processes: list[Process],
) -> None:
    cats, dogs, now = await tenant(processes, "cats"), await tenant(processes, "dogs"), utc_now()
    one = processes[0]
    creation = OperationKind.CREATE_MODEL
    async with one.database.write() as transaction:
        for owner, amount in ((cats, 10), (dogs, 1000)):
            await set_budget(transaction, owner, BudgetName(Period.TOTAL), amount, now)
        await spend(transaction, [used(cats, 10), used(dogs, 10)], now)
    lanes = {(owner, kind): await ready_run(one, owner) for owner in (cats, dogs) for kind in ("pass", "step", "new")}
    for (owner, kind), run in lanes.items():
        sent = {
            "pass": batch(owner, run, 1),
            "step": step(owner, run, 1),
            "new": replace(step(owner, run, 0), kind=creation),
        }
        await one.training.accept(sent[kind], DEFAULTS)
    async with one.database.read() as session:
        await ready_heads(one.ledger, session, BASE)
        found = await one.ledger.pending_training(session, BASE, trainer=TRAINER, after_position=0)
        holds = await holds_of(session, [op.id for op in found], now)
    held = {lane for lane, run in lanes.items() for op in found if op.run == run and op.starts_at == inf}
    assert held == {(cats, "pass"), (cats, "new")}
    told = {lane for lane, run in lanes.items() for op in found if op.run == run and op.id in holds}
    assert told == held


async def test_a_budget_that_is_lowered_below_what_is_spent_is_told(processes: list[Process]) -> None:
    cats, now = await tenant(processes, "cats"), utc_now()
    async with processes[0].database.write() as transaction:
        await set_budget(transaction, cats, BudgetName(Period.DAY), 1000, now)
        await spend(transaction, [used(cats, 90)], now)
        assert await alerts_of(transaction, cats) == []
        await set_budget(transaction, cats, BudgetName(Period.DAY), 100, now)
        assert [one.percent for one in await alerts_of(transaction, cats)] == [80]


async def test_tenants_behind_many_with_a_spent_budget_are_found(processes: list[Process]) -> None:
    one, now = processes[0], utc_now()
    owners = []
    async with one.database.write() as transaction:
        for number in range(MOST_TENANTS + 3):
            owner = await create_tenant(transaction, name=f"many-{number}", clock=utc_now)
            owners.append(owner)
            await one.ledger.accept(transaction, sample(owner, 0, max_tokens=8))
    *_, last = sorted(owners)
    async with one.database.write() as transaction:
        for owner in sorted(owners)[:2]:
            await set_budget(transaction, owner, BudgetName(Period.DAY), 1, now)
            await spend(transaction, [used(owner, 1)], now)
    async with one.database.read() as session:
        first = (await waiting_samples(session, BASE, of_each=1, now=now)).of
        assert len(first) == MOST_TENANTS
        assert [first[owner] for owner in sorted(owners)[:2]] == [[], []]
        assert last in (await waiting_samples(session, BASE, of_each=1, after_tenant=max(first), now=now)).of


async def test_two_processes_that_cross_a_budget_at_once_make_one_alert_each_and_hold_the_rest(
    processes: list[Process],
) -> None:
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    one = processes[0]
    async with one.database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"pending_samples": None})
        for period, amount in ((Period.DAY, 100), (Period.TOTAL, 1000)):
            await set_budget(transaction, cats, BudgetName(period), amount, utc_now())
    for seq_id in range(12):
        await one.samples.accept(sample(cats, seq_id, max_tokens=16))
        await one.samples.accept(sample(dogs, seq_id, max_tokens=16))
    async with one.database.read() as session:
        ready = [op for op in await pending_samples(one.ledger, session, BASE) if op.tenant == cats]
    # 10 tokens each.
    drawn = SampleOutput([SampledSequence("stop", np.zeros(10, np.int32), np.zeros(10, np.float32))])
    used = 10 + ready[0].tokens
    await asyncio.gather(
        *(complete(processes[place % PROCESSES], [(op, drawn)]) for place, op in enumerate(ready[:10]))
    )
    async with one.database.read() as session:
        found = {budget.name.period: budget for budget in await budgets_of(session, cats, utc_now())}
        alerts = await alerts_of(session, cats)
        waiting = (await waiting_samples(session, BASE, of_each=30, now=utc_now())).of
    assert {period: budget.spent for period, budget in found.items()} == {
        Period.DAY: 10 * used,
        Period.TOTAL: 10 * used,
    }
    assert sorted((alert.name.period, alert.percent) for alert in alerts) == [("day", 80), ("day", 100)]
    # Nothing of theirs begins any more; others' work does.
    assert not waiting.get(cats)
    assert len(waiting[dogs]) == 12
    async with one.database.write() as transaction:
        await set_budget(transaction, cats, BudgetName(Period.DAY), 500, utc_now())
    async with one.database.read() as session:
        assert len((await waiting_samples(session, BASE, of_each=30, now=utc_now())).of[cats]) == 2


async def test_a_budget_counts_what_was_used_before_it_was_set(processes: list[Process]) -> None:
    cats = await tenant(processes, "cats")
    one = processes[0]
    for seq_id in range(3):
        await one.samples.accept(sample(cats, seq_id, max_tokens=16))
    async with one.database.read() as session:
        ready = await pending_samples(one.ledger, session, BASE)
    drawn = SampleOutput([SampledSequence("stop", np.zeros(10, np.int32), np.zeros(10, np.float32))])
    await complete(one, [(op, drawn) for op in ready])
    async with one.database.write() as transaction:
        await set_budget(transaction, cats, BudgetName(Period.MONTH), 10, utc_now())
    async with one.database.read() as session:
        (budget,) = await budgets_of(session, cats, utc_now())
    assert budget.spent == 3 * (10 + ready[0].tokens)
    assert budget.is_spent


WAITING_FOR_A_COUNT = text(
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


async def test_a_request_that_waits_for_its_count_holds_no_rate(limited: list[Process]) -> None:
    """Else it and one near the limits, which has the count and wants the rate, would wait for each other."""
    cats, dogs = [await tenant(limited, name) for name in ("cats", "dogs")]
    run, theirs = await ready_run(limited[0], cats), await ready_run(limited[0], dogs)
    async with limited[0].database.read() as session:
        limits = await limits_of(session, cats, DEFAULTS)
    pace = limits.pace(Meter.TRAIN)
    assert pace is not None
    async with asyncio.timeout(60), limited[0].database.write() as transaction:
        await hold_count(transaction, Counted.TRAINING, [cats])
        waiting = asyncio.create_task(limited[1].training.accept(batch(cats, run, 1), limits))
        is_waiting = 0
        while not is_waiting:
            async with limited[2].database.read() as session:
                is_waiting = await session.scalar(WAITING_FOR_A_COUNT) or 0
        await limited[2].training.accept(batch(dogs, theirs, 1), DEFAULTS)
        await charge(transaction, cats, Meter.TRAIN, pace, cost=1, now=utc_now())
    assert await waiting
