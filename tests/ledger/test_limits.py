"""Limits are exact while several API processes accept at once, each with its own connections to one PostgreSQL."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, SequenceConflict, StorageFull, TooManyOperations, TooManySamples, WeftError
from contracts.ids import RequestId, RunId, SamplerId, TenantId
from contracts.ledger_records import UNLOAD_SEQ_ID, Completion, NewOperation, OperationState
from contracts.losses import LossName
from contracts.operations import Datum, LoraSettings, LossSpec, OperationKind, OptimStepped, TrainingBatch
from contracts.paths import Segment
from store.clock import utc_now
from store.tables import Checkpoint, Run, RunState, SampleRecord, Session
from tenants.checkpoints import NewCheckpoint, new_checkpoint_id, record_checkpoint
from tenants.keys import create_key
from tenants.limit_use import ALL_USE, RUN_USE
from tenants.limits import Counted, hold_count, limits_of, set_tenant
from tenants.run_retention import drop_snapshots
from tenants.runs import NewRun, open_run_within_limit, run_id_for
from tenants.sample_records import LEAST_BYTES, NewRecord, record_samples
from tenants.samplers import NewSampler, create_sampler
from tenants.sessions import NewSession, create_limited_session, create_session
from tenants.storage import check_storage
from tenants.tenant_names import find_tenant
from tenants.webhooks import WebhookSpec, set_webhook
from testing.runs import create_run
from tests.ledger.api_processes import (
    BASE,
    DEFAULTS,
    MOST,
    PROCESSES,
    Process,
    process,
    ready_run,
    sample,
    step,
    tenant,
)
from tests.ledger_heads import ready_heads


async def outcomes(processes: list[Process], samples: list[NewOperation]) -> Counter[str]:
    """Return the numbers accepted, and refused by each error, when all come at once to all processes in turn."""
    asked = [processes[place % PROCESSES].samples.accept(one) for place, one in enumerate(samples)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    return Counter("accepted" if isinstance(one, str) else type(one).__name__ for one in found)


async def test_three_processes_accept_exactly_as_many_samples_as_the_tenant_may_have(processes: list[Process]) -> None:
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    many = [sample(cats, seq_id) for seq_id in range(60)]
    theirs = [sample(dogs, seq_id) for seq_id in range(60)]
    mixed = [one for pair in zip(many, theirs, strict=True) for one in pair]
    found = await outcomes(processes, mixed)
    assert found == {"accepted": MOST + len(theirs), TooManySamples.__name__: len(many) - MOST}


async def test_tokens_of_pending_samples_are_counted_together(processes: list[Process]) -> None:
    async with processes[0].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"sample_tokens": 50, "pending_samples": None})
    cats = await tenant(processes, "cats")
    # Each may take 4 + 8 tokens: four fit into 50.
    found = await outcomes(processes, [sample(cats, seq_id, max_tokens=8) for seq_id in range(30)])
    assert found == {"accepted": 4, TooManySamples.__name__: 26}


async def test_a_repeat_is_found_at_the_limit(processes: list[Process]) -> None:
    cats = await tenant(processes, "cats")
    first: list[RequestId] = [await processes[0].samples.accept(sample(cats, seq_id)) for seq_id in range(MOST)]
    again = [await processes[1].samples.accept(sample(cats, seq_id)) for seq_id in range(MOST)]
    assert again == first


async def test_samples_of_one_request_are_accepted_together_or_not_at_all(processes: list[Process]) -> None:
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    mine = processes[0].samples
    for seq_id in range(MOST - 1):
        await mine.accept(sample(cats, seq_id))
    pairs = [[sample(owner, seq_id) for seq_id in (10, 11)] for owner in (cats, dogs)]
    refused, taken = await asyncio.gather(*map(mine.accept_together, pairs), return_exceptions=True)
    assert isinstance(refused, TooManySamples)
    assert not isinstance(taken, BaseException)
    assert [one.id for one in taken] == [one.id for one in pairs[1]]
    # Neither was recorded: one of the two fits.
    single = sample(cats, 11)
    assert await mine.accept(single) == single.id
    with pytest.raises(InvalidRequest):
        await mine.accept_together([sample(cats, seq_id) for seq_id in range(20, 21 + MOST)])


async def test_a_conflict_of_one_sample_leaves_none_of_its_request(processes: list[Process]) -> None:
    dogs, cats = await tenant(processes, "dogs"), await tenant(processes, "cats")
    first = await processes[0].samples.accept_together([sample(dogs, seq_id) for seq_id in (0, 1)])
    others = [sample(dogs, seq_id, max_tokens=2) for seq_id in (1, 2)]
    theirs = [sample(cats, seq_id, max_tokens=2) for seq_id in (1, 2)]
    conflict, taken = await asyncio.gather(
        processes[1].samples.accept_together(others[::-1]),
        processes[1].samples.accept_together(theirs),
        return_exceptions=True,
    )
    assert isinstance(conflict, SequenceConflict)
    assert not isinstance(taken, BaseException)
    assert [one.id for one in taken] == [one.id for one in theirs]
    free = sample(dogs, 2)
    assert await processes[2].samples.accept(free) == free.id
    again = await processes[2].samples.accept_together([sample(dogs, seq_id) for seq_id in (0, 1)])
    assert [one.id for one in again] == [one.id for one in first]


async def steps(processes: list[Process], operations: list[NewOperation]) -> Counter[str]:
    """Return the numbers accepted, and refused by each error, when all come at once to all processes in turn."""
    asked = []
    for place, one in enumerate(operations):
        accepting = processes[place % PROCESSES]
        async with accepting.database.read() as session:
            limits = await limits_of(session, one.tenant, DEFAULTS)
        asked.append(accepting.training.accept(one, limits))
    found = await asyncio.gather(*asked, return_exceptions=True)
    return Counter("accepted" if isinstance(one, str) else type(one).__name__ for one in found)


async def test_three_processes_accept_exactly_as_much_training_as_the_tenant_may_have(
    processes: list[Process],
) -> None:
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    mine, theirs = await ready_run(processes[0], cats), await ready_run(processes[0], dogs)
    many = [step(cats, mine, seq_id) for seq_id in range(1, 31)]
    others = [step(dogs, theirs, seq_id) for seq_id in range(1, 31)]
    await processes[0].training.accept(many[0], DEFAULTS)
    found = await steps(processes, [one for pair in zip(many, others, strict=True) for one in pair])
    assert found == {"accepted": MOST + len(others), TooManyOperations.__name__: len(many) - MOST}


async def test_far_and_near_the_limit_are_counted_together(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests far from the limit take no lock alone; as many as fit into the limit are accepted none the less."""
    monkeypatch.setattr("ledger.training_intake._UNLOCKED", 40)
    async with processes[0].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"pending_operations": 60})
    cats = await tenant(processes, "cats")
    run = await ready_run(processes[0], cats)
    await processes[0].training.accept(step(cats, run, 1), DEFAULTS)
    found = await steps(processes, [step(cats, run, seq_id) for seq_id in range(1, 101)])
    assert found == {"accepted": 60, TooManyOperations.__name__: 40}


async def test_bytes_of_pending_training_are_counted_and_one_that_never_fits_fails(processes: list[Process]) -> None:
    async with processes[0].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"pending_bytes": 50_000, "pending_operations": None})
    cats = await tenant(processes, "cats")
    run = await ready_run(processes[0], cats)
    async with processes[0].database.read() as session:
        limits = await limits_of(session, cats, DEFAULTS)
    # The first closes a gap once others wait behind it, and is accepted beyond the limit then.
    many = [step(cats, run, seq_id, nbytes=16_000) for seq_id in range(1, 13)]
    await processes[0].training.accept(many[0], limits)
    found = await steps(processes, many)
    assert found == {"accepted": 3, TooManyOperations.__name__: 9}
    failed = await processes[1].training.accept(step(cats, run, 40, nbytes=80_000), limits)
    status = await processes[1].ledger.status(cats, failed)
    assert (status.state, status.error_category) == (OperationState.FAILED, "user")
    assert "the limit for all pending training together is 50000" in (status.error_message or "")


async def test_bytes_of_pending_training_are_counted_before_compression(processes: list[Process]) -> None:
    """A batch of equal numbers is stored in a few hundred bytes, and takes all its memory in the trainer."""
    async with processes[0].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"pending_bytes": 500_000, "pending_operations": None})
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    mine, theirs = await ready_run(processes[0], cats), await ready_run(processes[0], dogs)

    async def zeros(owner: TenantId, run: RunId, seq_id: int, sequences: int = 1) -> NewOperation:
        numbers = np.zeros(16_384, dtype=np.int64)
        datum = Datum(numbers, numbers, {"weights": np.zeros(16_384, dtype=np.float32)})
        new, batch = (
            step(owner, run, seq_id, nbytes=1),
            TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [datum] * sequences),
        )
        return replace(new, payload=await processes[0].ledger.payloads.store(owner, new.id, batch))

    many = [await zeros(cats, mine, seq_id) for seq_id in range(1, 5)]
    assert max(one.payload.stored_bytes for one in many) < 1000
    others = [await zeros(dogs, theirs, seq_id) for seq_id in range(1, 5)]
    async with processes[0].database.read() as session:
        limits = await limits_of(session, cats, DEFAULTS)
    await processes[0].training.accept(many[0], limits)
    found = await steps(processes, [one for pair in zip(many, others, strict=True) for one in pair])
    assert found == {"accepted": 2 + len(others), TooManyOperations.__name__: 2}
    failed = await processes[1].training.accept(await zeros(cats, mine, 40, sequences=3), limits)
    status = await processes[1].ledger.status(cats, failed)
    assert "the limit for all pending training together is 500000" in (status.error_message or "")


async def test_a_gap_can_be_closed_at_the_limit(processes: list[Process]) -> None:
    """Otherwise what waits behind the gap would fill the limit for ever."""
    cats = await tenant(processes, "cats")
    run = await ready_run(processes[0], cats)
    found = await steps(processes, [step(cats, run, seq_id) for seq_id in range(2, MOST + 3)])
    assert found == {"accepted": MOST, TooManyOperations.__name__: 1}
    assert await steps(processes, [step(cats, run, 1)]) == {"accepted": 1}


async def test_a_run_can_be_unloaded_at_the_limit(processes: list[Process]) -> None:
    """Otherwise a tenant whose work waits for room could not make any."""
    cats = await tenant(processes, "cats")
    run = await ready_run(processes[0], cats)
    found = await steps(processes, [step(cats, run, seq_id) for seq_id in range(1, MOST + 2)])
    assert found == {"accepted": MOST, TooManyOperations.__name__: 1}
    unload = replace(step(cats, run, UNLOAD_SEQ_ID), kind=OperationKind.UNLOAD_MODEL)
    assert await steps(processes, [unload]) == {"accepted": 1}


async def test_a_request_beyond_the_limit_is_accepted_as_soon_as_another_has_ended(
    processes: list[Process], tmp_path: Path
) -> None:
    one = process(processes[0].url, tmp_path, hold_seconds=20)
    cats = await tenant(processes, "cats")
    run = await ready_run(one, cats)
    async with one.database.read() as session:
        limits = await limits_of(session, cats, DEFAULTS)
    for seq_id in range(1, MOST + 1):
        await one.training.accept(step(cats, run, seq_id), limits)
    waiting = asyncio.create_task(one.training.accept(step(cats, run, MOST + 1), limits))
    async with asyncio.timeout(30):
        await one.wakeups.listened.wait()
    assert not waiting.done()
    async with one.database.read() as session:
        head = (await ready_heads(one.ledger, session, BASE))[0]
    async with one.database.write() as transaction:
        await one.ledger.complete(transaction, [Completion(head, OptimStepped({}))])
    async with asyncio.timeout(15):
        assert await waiting
    await one.database.close()


async def test_two_trainers_open_exactly_as_many_runs_as_the_tenant_may_have(processes: list[Process]) -> None:
    async with processes[0].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"open_runs": 4})
        cats = await find_tenant(transaction, name="cats")
        session = await create_session(transaction, cats, NewSession([], None, "", None, None), utc_now)
        for number in range(20):
            new = NewRun(session, number, BASE, LoraSettings(rank=4, seed=7), None)
            await create_run(transaction, cats, new, utc_now)

    async def open_one(number: int) -> bool:
        async with processes[number % PROCESSES].database.write() as transaction:
            return await open_run_within_limit(transaction, cats, run_id_for(session, number), DEFAULTS)

    assert sum(await asyncio.gather(*map(open_one, range(20)))) == 4


async def test_snapshots_of_ended_sessions_are_bounded_by_the_storage_and_another_tenants_runs_open(
    processes: list[Process],
) -> None:
    """A tenant that ends each session with its run's snapshot written has no open run, and yet gets no more of them."""
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    database, opened = processes[0].database, Counter[TenantId]()
    async with database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"stored_bytes": 350, "open_runs": 1})
    for owner in [cats, dogs] * 6:
        async with database.write() as transaction:
            session = await create_session(transaction, owner, NewSession([], None, "", None, None), utc_now)
            run = await create_run(transaction, owner, NewRun(session, 0, BASE, LoraSettings(4, seed=7), None), utc_now)
            if await open_run_within_limit(transaction, owner, run, DEFAULTS):
                opened[owner] += 1
                kept = {"snapshot_dir": f"snapshots/{run}", "snapshot_bytes": 100}
                await transaction.execute(update(Run).where(Run.id == run).values(**kept))
            await transaction.execute(update(Session).where(Session.id == session).values(ended_at=utc_now()))
    # Below 350 bytes one more opens, which then has 100.
    assert opened == {cats: 4, dogs: 6}
    async with database.write() as transaction:
        await transaction.execute(update(Run).where(Run.tenant_id == cats).values(state=RunState.UNLOADED))
        await drop_snapshots(transaction, most=100)
    async with database.read() as reading:
        assert (await RUN_USE.of(reading, cats, DEFAULTS)).may_open_run


async def test_saves_fill_the_storage_and_never_more(processes: list[Process]) -> None:
    async with processes[0].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"stored_bytes": 350})
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    runs = {one: await ready_run(processes[0], one) for one in (cats, dogs)}

    async def save(owner: TenantId, number: int, name: str) -> None:
        new = NewCheckpoint(new_checkpoint_id(), runs[owner], Segment.WEIGHTS, name, 100, None, True, None)
        async with processes[number % PROCESSES].database.write() as transaction:
            await hold_count(transaction, Counted.STORAGE, [owner])
            await record_checkpoint(transaction, owner, new, utc_now)
            await check_storage(transaction, owner, DEFAULTS)

    asked = [save(owner, number, f"save-{number}") for number in range(10) for owner in (cats, dogs)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert Counter(type(one).__name__ for one in found) == {"NoneType": 3 + 10, StorageFull.__name__: 7}
    async with processes[0].database.read() as session:
        kept = await session.scalar(select(Checkpoint.name).where(Checkpoint.tenant_id == cats))
    # One that replaces another needs no room of its own.
    await save(cats, 0, str(kept))


async def make_key(transaction: AsyncSession, owner: TenantId, number: int) -> None:
    await create_key(transaction, tenant=owner, note=f"n{number}", clock=utc_now, defaults=DEFAULTS)


async def make_webhook(transaction: AsyncSession, owner: TenantId, number: int) -> None:
    spec = WebhookSpec("https://hooks.example.com/", ["*"])
    await set_webhook(transaction, owner, f"n{number}", spec, networks=(), defaults=DEFAULTS, now=utc_now())


async def make_session(transaction: AsyncSession, owner: TenantId, number: int) -> None:
    new = NewSession([], None, "", None, None)
    await create_limited_session(transaction, owner, new, utc_now, idempotency_key=f"n{number}", defaults=DEFAULTS)


@pytest.mark.parametrize(
    ("limit", "make"), [("keys", make_key), ("webhooks", make_webhook), ("sessions", make_session)]
)
async def test_three_processes_make_exactly_as_many_as_the_tenant_may_have(
    processes: list[Process], limit: str, make: Callable[[AsyncSession, TenantId, int], Awaitable[None]]
) -> None:
    async with processes[0].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={limit: 4})
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")

    async def made(owner: TenantId, number: int) -> None:
        async with processes[number % PROCESSES].database.write() as transaction:
            await make(transaction, owner, number)

    asked = [made(owner, number) for number in range(9) for owner in (cats, dogs)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [one for one in found if one is not None and not isinstance(one, WeftError)] == []
    assert [sum(one is None for one in found[of::2]) for of in (0, 1)] == [4, 9]


async def test_records_of_samples_stay_within_their_bytes_over_several_processes(processes: list[Process]) -> None:
    """Every process records for both tenants at once. The oldest of one go, and none of the other."""
    cats, dogs = [await tenant(processes, name) for name in ("cats", "dogs")]
    body, each = bytes(LEAST_BYTES), 5
    samplers: dict[TenantId, SamplerId] = {}
    async with processes[0].database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"sample_record_bytes": MOST * LEAST_BYTES})
        for one in (cats, dogs):
            session = await create_session(transaction, one, NewSession([], None, "raw", None, None), utc_now)
            samplers[one] = await create_sampler(transaction, one, NewSampler(session, 0, BASE), utc_now)

    async def recorded(one: Process, round: int) -> None:
        now = utc_now()
        names = [
            (who, f"{who[:8]}-{round}-{processes.index(one)}-{number}")
            for who in (cats, dogs)
            for number in range(each)
        ]
        new = [NewRecord(RequestId(name), who, samplers[who], body) for who, name in names]
        async with one.database.write() as transaction:
            await record_samples(transaction, new, DEFAULTS, now=now, expires_at=now + timedelta(hours=1))

    for round in range(3):
        await asyncio.gather(*(recorded(one, round) for one in processes))
    async with processes[0].database.read() as session:
        rows = (await session.execute(select(SampleRecord.tenant_id, SampleRecord.operation_id))).all()
        use = await ALL_USE.of(session, cats, DEFAULTS)
    assert Counter(row.tenant_id for row in rows) == {cats: MOST, dogs: 3 * PROCESSES * each}
    assert {row.operation_id[9] for row in rows if row.tenant_id == cats} == {"2"}
    assert (use.used["sample_record_bytes"], use.room("sample_record_bytes")) == (MOST * LEAST_BYTES, 0)
