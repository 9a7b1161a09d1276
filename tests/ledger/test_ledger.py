"""The ledger's promises, on both databases."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import EngineFailure, InvalidRequest, NotFound, RunUnloaded, SequenceConflict
from contracts.ids import RequestId, RunId, SamplerId, SessionId, TenantId
from contracts.ledger_records import (
    UNLOAD_SEQ_ID,
    Completion,
    NewOperation,
    OperationState,
    ReadyOperation,
    RejectedOperation,
    StoredPayload,
)
from contracts.operations import (
    CreateModel,
    LoraSettings,
    ModelCreated,
    OperationKind,
    OptimStep,
    OptimStepped,
    Payload,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    UnloadModel,
)
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.pruning import drop_covered_payloads, prune
from ledger.wakeups import Wakeups, operation_topic, placements_topic
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.tables import Base, Operation, OperationPayload, OperationResult, Run, RunState
from telemetry.telemetry import Telemetry
from tenants.runs import NewRun
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.runs import create_run
from tests.ledger_heads import pending_samples, ready_heads
from tests.payloads import digest, stored

BASE = "test/tiny"


@dataclass
class MovableClock:
    """A clock that shows the same time until the test moves it."""

    now: datetime = field(default_factory=lambda: datetime(2026, 1, 1, tzinfo=UTC))

    def __call__(self) -> datetime:
        return self.now

    def move(self, by: timedelta) -> None:
        self.now += by


@dataclass
class Bench:
    """A ledger over a fresh database with one tenant and one ready run, whose next seq_id is 1."""

    database: Database
    ledger: Ledger
    wakeups: Wakeups
    clock: MovableClock
    tenant: TenantId
    session: SessionId
    run: RunId

    async def accept(
        self, seq_id: int, payload: Payload | None = None, *, run: str | None = None, kind: OperationKind | None = None
    ) -> RequestId:
        payload = payload or OptimStep(learning_rate=seq_id * 1e-3)
        async with self.database.write() as transaction:
            return await self.ledger.accept(
                transaction,
                NewOperation(
                    tenant=self.tenant,
                    lane=run or self.run,
                    seq_id=seq_id,
                    kind=kind or OperationKind.OPTIM_STEP,
                    base_model=BASE,
                    payload=stored(payload),
                    digest=digest(payload),
                ),
            )

    async def accept_sample(self, sampler: str, seq_id: int) -> RequestId:
        payload = SampleRequest(prompt=np.array([1, 2, 3], dtype=np.int64))
        return await self.accept(seq_id, payload, run=SamplerId(sampler), kind=OperationKind.SAMPLE)

    async def reject(self, seq_id: int, *, body: bytes = b"x") -> RequestId:
        async with self.database.write() as transaction:
            return await self.ledger.reject(
                transaction,
                RejectedOperation(
                    tenant=self.tenant,
                    lane=self.run,
                    seq_id=seq_id,
                    kind=OperationKind.FORWARD_BACKWARD,
                    base_model=BASE,
                    digest=body.ljust(16, b"\0"),
                    error=InvalidRequest("data must not be empty"),
                ),
            )

    async def ready(self) -> list[ReadyOperation]:
        async with self.database.read() as session:
            return await ready_heads(self.ledger, session, BASE)

    async def finish(self, *operations: ReadyOperation, outcome: object = None) -> None:
        async with self.database.write() as transaction:
            await self.ledger.complete(
                transaction,
                [Completion(one, outcome or OptimStepped({"lr": 0.5})) for one in operations],  # type: ignore[arg-type]
            )

    async def next_seq_id(self, run: str | None = None) -> int:
        async with self.database.read() as session:
            return await session.scalar(select(Run.next_seq_id).where(Run.id == (run or self.run))) or 0

    async def add_run(self, model_seq_id: int) -> RunId:
        async with self.database.write() as transaction:
            return await _ready_run(self, transaction, model_seq_id)

    async def count(self, table: type[Base]) -> int:
        async with self.database.read() as session:
            return await session.scalar(select(func.count()).select_from(table)) or 0


async def _ready_run(bench: Bench, transaction: AsyncSession, model_seq_id: int) -> RunId:
    new = NewRun(bench.session, model_seq_id, BASE, LoraSettings(rank=4, seed=7), None)
    run = await create_run(transaction, bench.tenant, new, bench.clock)
    await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.READY, next_seq_id=1))
    return run


@pytest_asyncio.fixture
async def bench(database_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    engine = create_engine(database_url)
    database, wakeups, clock = Database(engine), Wakeups(), MovableClock()
    ledger = Ledger(database, wakeups, clock, Telemetry.of("test", clock), PayloadFiles(DataFolder(tmp_path)))
    async with database.write() as transaction:
        tenant = await create_tenant(transaction, name="cats", clock=clock)
        session = await create_session(transaction, tenant, NewSession([], None, "0.38.0", None, None), clock)
        bench = Bench(database, ledger, wakeups, clock, tenant, session, RunId(""))
        bench.run = await _ready_run(bench, transaction, 0)
    yield bench
    await database.close()


# --- one key, one operation ------------------------------------------------------------------------------------------


async def test_same_key_concurrently_gives_one_row_and_one_id(bench: Bench) -> None:
    ids = await asyncio.gather(*(bench.accept(1) for _ in range(12)))
    assert len(set(ids)) == 1
    assert await bench.count(Operation) == 1
    assert await bench.count(OperationPayload) == 1


async def test_same_key_with_another_body_is_a_conflict_and_changes_nothing(bench: Bench) -> None:
    first = await bench.accept(1, OptimStep(learning_rate=1.0))
    with pytest.raises(SequenceConflict, match="seq_id 1"):
        await bench.accept(1, OptimStep(learning_rate=2.0))
    assert await bench.accept(1, OptimStep(learning_rate=1.0)) == first
    assert await bench.count(Operation) == 1


async def test_concurrent_conflicting_bodies_have_exactly_one_winner(bench: Bench) -> None:
    outcomes = await asyncio.gather(
        *(bench.accept(1, OptimStep(learning_rate=float(i % 2))) for i in range(8)), return_exceptions=True
    )
    winners = {outcome for outcome in outcomes if isinstance(outcome, str)}
    assert len(winners) == 1
    assert sum(isinstance(outcome, SequenceConflict) for outcome in outcomes) == 4


async def test_rejection_repeated_concurrently_gives_one_row(bench: Bench) -> None:
    ids = await asyncio.gather(*(bench.reject(1) for _ in range(8)))
    assert len(set(ids)) == 1
    assert await bench.count(Operation) == 1
    assert await bench.next_seq_id() == 2


async def test_same_seq_id_in_two_lanes_is_two_operations(bench: Bench) -> None:
    other = await bench.add_run(1)
    assert await bench.accept(1) != await bench.accept(1, run=other)


# --- order -----------------------------------------------------------------------------------------------------------


async def test_operations_run_by_seq_id_whatever_the_arrival(bench: Bench) -> None:
    for seq_id in (3, 1, 4, 2):
        await bench.accept(seq_id)
    seen = []
    while ready := await bench.ready():
        assert len(ready) == 1
        seen.append(ready[0].seq_id)
        await bench.finish(ready[0])
    assert seen == [1, 2, 3, 4]
    assert await bench.next_seq_id() == 5


async def test_missing_seq_id_holds_later_ones_back(bench: Bench) -> None:
    await bench.accept(2)
    assert await bench.ready() == []
    await bench.accept(1)
    assert [one.seq_id for one in await bench.ready()] == [1]


async def test_a_hole_in_one_run_does_not_hold_another(bench: Bench) -> None:
    other = await bench.add_run(1)
    await bench.accept(2)
    await bench.accept(1, run=other)
    assert [one.lane for one in await bench.ready()] == [other]


async def test_ready_heads_come_in_order_of_acceptance(bench: Bench) -> None:
    runs = [await bench.add_run(i) for i in range(1, 4)]
    for run in reversed(runs):
        await bench.accept(1, run=run)
    assert [one.lane for one in await bench.ready()] == list(reversed(runs))


async def test_work_for_another_base_is_not_ready_here(bench: Bench) -> None:
    await bench.accept(1)
    async with bench.database.read() as session:
        assert await ready_heads(bench.ledger, session, "another/base") == []


async def test_payload_comes_back_as_it_was(bench: Bench) -> None:
    await bench.accept(1, OptimStep(learning_rate=0.25, beta1=0.5))
    (ready,) = await bench.ready()
    assert ready.payload == OptimStep(learning_rate=0.25, beta1=0.5)
    assert (ready.tenant, ready.kind) == (bench.tenant, OperationKind.OPTIM_STEP)


# --- rejection leaves no hole ----------------------------------------------------------------------------------------


async def test_rejected_head_lets_the_next_run(bench: Bench) -> None:
    await bench.accept(2)
    await bench.reject(1)
    assert await bench.next_seq_id() == 2
    assert [one.seq_id for one in await bench.ready()] == [2]


async def test_rejected_middle_is_stepped_over_when_its_turn_comes(bench: Bench) -> None:
    await bench.reject(2)
    await bench.reject(3)
    await bench.accept(4)
    assert await bench.next_seq_id() == 1
    await bench.accept(1)
    (head,) = await bench.ready()
    await bench.finish(head)
    assert await bench.next_seq_id() == 4


async def test_rejected_operation_reports_its_reason(bench: Bench) -> None:
    status = await bench.ledger.status(bench.tenant, await bench.reject(1))
    assert status.state is OperationState.FAILED
    assert (status.error_code, status.error_category) == ("invalid_request", "user")
    assert status.error_message == "data must not be empty"


async def test_failed_operation_advances_the_run_too(bench: Bench) -> None:
    request = await bench.accept(1)
    await bench.accept(2)
    (head,) = await bench.ready()
    await bench.finish(head, outcome=EngineFailure("the pass failed"))
    status = await bench.ledger.status(bench.tenant, request)
    assert (status.state, status.error_category) == (OperationState.FAILED, "server")
    assert [one.seq_id for one in await bench.ready()] == [2]


# --- completing ------------------------------------------------------------------------------------------------------


async def test_operations_completed_together_advance_together(bench: Bench) -> None:
    other = await bench.add_run(1)
    await bench.accept(1)
    await bench.accept(1, run=other)
    await bench.finish(*await bench.ready())
    assert (await bench.next_seq_id(), await bench.next_seq_id(other)) == (2, 2)


async def test_second_completion_is_ignored(bench: Bench) -> None:
    request = await bench.accept(1)
    (head,) = await bench.ready()
    await bench.finish(head, outcome=OptimStepped({"lr": 1.0}))
    await bench.finish(head, outcome=OptimStepped({"lr": 2.0}))
    status = await bench.ledger.status(bench.tenant, request)
    assert await bench.ledger.result(bench.tenant, status) == OptimStepped({"lr": 1.0})
    assert await bench.next_seq_id() == 2


async def test_a_payload_that_cannot_be_read_now_holds_up_no_other(bench: Bench, tmp_path: Path) -> None:
    """A disk's fault at one file, which a folder in the file's place stands for."""
    kind, missing = OperationKind.FORWARD_BACKWARD, StoredPayload(b"", file_digest=b"d" * 16, file_bytes=9)
    new = NewOperation(bench.tenant, bench.run, 1, kind, BASE, missing, b"d" * 16)
    (tmp_path / "payloads" / new.id[:2] / new.id).mkdir(parents=True)
    async with bench.database.write() as transaction:
        await bench.ledger.accept(transaction, new)
    other = await bench.accept(2)
    async with bench.database.read() as session:
        assert [one.id for one in await bench.ledger.load(session, [new.id, other])] == [other]


async def test_a_repeat_over_an_upgrade_is_no_conflict(bench: Bench) -> None:
    """Digests of another version cannot be compared: the key alone decides."""
    first = await bench.accept(1)
    other = await bench.accept(2)
    async with bench.database.write() as transaction:
        await transaction.execute(update(Operation).where(Operation.id == first).values(body_digest=b"0" * 16))
    assert await bench.accept(1, OptimStep(learning_rate=0.5)) == first
    with pytest.raises(SequenceConflict):
        await bench.accept(2, OptimStep(learning_rate=0.5))
    assert await bench.accept(2) == other


async def test_neighbours_completed_concurrently_leave_no_stale_turn(bench: Bench) -> None:
    await bench.accept(1)
    (head,) = await bench.ready()
    await asyncio.gather(bench.finish(head), bench.reject(2), bench.reject(3))
    assert await bench.next_seq_id() == 4


async def test_rolled_back_acceptance_announces_nothing(bench: Bench) -> None:
    payload = OptimStep()
    new = NewOperation(bench.tenant, bench.run, 1, OperationKind.OPTIM_STEP, BASE, stored(payload), digest(payload))

    async def accept_and_fail() -> None:
        async with bench.database.write() as transaction:
            await bench.ledger.accept(transaction, new)
            raise RuntimeError("later in the same request")

    with bench.wakeups.listen(placements_topic(BASE)) as event:
        with pytest.raises(RuntimeError, match="later"):
            await accept_and_fail()
        assert not event.is_set()
        assert await bench.count(Operation) == 0
        await bench.accept(1)
        assert event.is_set()


async def test_unload_waits_for_the_work_that_is_ready(bench: Bench) -> None:
    await bench.accept(UNLOAD_SEQ_ID, UnloadModel(), kind=OperationKind.UNLOAD_MODEL)
    await bench.accept(1)
    (head,) = await bench.ready()
    assert head.seq_id == 1
    await bench.finish(head)
    (unload,) = await bench.ready()
    assert unload.kind is OperationKind.UNLOAD_MODEL


async def test_pending_work_of_an_unloaded_run_fails_and_its_waiters_wake(bench: Bench) -> None:
    held_back = await bench.accept(2)
    unload = await bench.accept(UNLOAD_SEQ_ID, UnloadModel(), kind=OperationKind.UNLOAD_MODEL)
    with bench.wakeups.listen(operation_topic(held_back)) as event:
        async with bench.database.write() as transaction:
            await bench.ledger.fail_pending(transaction, bench.run, RunUnloaded("the model was unloaded"))
        assert event.is_set()
    assert (await bench.ledger.status(bench.tenant, held_back)).error_code == "run_unloaded"
    assert (await bench.ledger.status(bench.tenant, unload)).state is OperationState.PENDING


async def test_create_operation_is_the_first_of_its_lane(bench: Bench) -> None:
    payload = CreateModel(BASE, LoraSettings(rank=4))
    async with bench.database.write() as transaction:
        new = NewRun(bench.session, 5, BASE, LoraSettings(rank=4, seed=1), None)
        run = await create_run(transaction, bench.tenant, new, bench.clock)
    await bench.accept(1, run=run)
    await bench.accept(0, payload, run=run, kind=OperationKind.CREATE_MODEL)
    (head,) = await bench.ready()
    assert (head.seq_id, head.payload) == (0, payload)
    await bench.finish(head, outcome=ModelCreated(run))
    assert [one.seq_id for one in await bench.ready()] == [1]


# --- samples ---------------------------------------------------------------------------------------------------------


async def test_samples_need_no_order_and_are_found_in_that_of_acceptance(bench: Bench) -> None:
    for seq_id in (10**18, 0, 7):
        await bench.accept_sample("s:sample:0", seq_id)
    async with bench.database.read() as session:
        pending = await pending_samples(bench.ledger, session, BASE)
    assert [one.seq_id for one in pending] == [10**18, 0, 7]
    assert isinstance(pending[0].payload, SampleRequest)
    np.testing.assert_array_equal(pending[0].payload.prompt, [1, 2, 3])
    assert await bench.ready() == []


async def test_array_results_survive(bench: Bench) -> None:
    request = await bench.accept_sample("s:sample:0", 0)
    async with bench.database.read() as session:
        (sample,) = await pending_samples(bench.ledger, session, BASE)
    tokens, logprobs = np.array([4, 5], np.int32), np.array([-0.5, -1.5], np.float32)
    await bench.finish(sample, outcome=SampleOutput([SampledSequence("stop", tokens, logprobs)]))
    status = await bench.ledger.status(bench.tenant, request)
    assert status.state is OperationState.DONE
    assert status.result_bytes
    result = await bench.ledger.result(bench.tenant, status)
    assert isinstance(result, SampleOutput)
    np.testing.assert_array_equal(result.sequences[0].tokens, tokens)
    np.testing.assert_array_equal(result.sequences[0].logprobs, logprobs)


# --- answering -------------------------------------------------------------------------------------------------------


async def test_foreign_tenant_learns_nothing(bench: Bench) -> None:
    request = await bench.accept(1)
    async with bench.database.write() as transaction:
        stranger = await create_tenant(transaction, name="dogs", clock=bench.clock)
    with pytest.raises(NotFound):
        await bench.ledger.status(stranger, request)
    with pytest.raises(NotFound):
        await bench.ledger.wait_until_final(stranger, request, seconds=5)
    await bench.finish(*await bench.ready())
    status = await bench.ledger.status(bench.tenant, request)
    assert await bench.ledger.result(stranger, status) is None
    assert await bench.ledger.result(bench.tenant, status) is not None


async def test_waiter_is_woken_by_the_completion(bench: Bench) -> None:
    request = await bench.accept(1)
    waiting = asyncio.create_task(bench.ledger.wait_until_final(bench.tenant, request, seconds=60))
    (head,) = await bench.ready()
    await bench.finish(head)
    async with asyncio.timeout(10):
        assert (await waiting).state is OperationState.DONE


async def test_wait_ends_pending_when_nothing_happens(bench: Bench) -> None:
    request = await bench.accept(1)
    status = await bench.ledger.wait_until_final(bench.tenant, request, seconds=0.01)
    assert status.state is OperationState.PENDING


# --- replay and pruning ----------------------------------------------------------------------------------------------


async def _finish_steps(bench: Bench, count: int) -> list[RequestId]:
    requests = [await bench.accept(seq_id) for seq_id in range(1, count + 1)]
    for _ in range(count):
        await bench.finish(*await bench.ready())
    return requests


async def _set_run(bench: Bench, **values: object) -> None:
    async with bench.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == bench.run).values(values))


async def _prune(bench: Bench) -> int:
    async with bench.database.write() as transaction:
        pruned = await prune(transaction, finished_before=bench.clock() - timedelta(hours=1), now=bench.clock())
        await drop_covered_payloads(transaction)
    return pruned


async def test_replay_lists_done_operations_between_bounds_by_seq_id(bench: Bench) -> None:
    await bench.accept(2)
    await bench.accept(1)
    await bench.reject(3)
    await bench.finish(*await bench.ready())
    await bench.finish(*await bench.ready())
    await bench.accept(4)
    async with bench.database.read() as session:
        replay = await bench.ledger.operations_to_replay(
            session, bench.run, "a trainer", after_seq_id=-1, before_seq_id=100
        )
        after = await bench.ledger.operations_to_replay(
            session, bench.run, "a trainer", after_seq_id=1, before_seq_id=2
        )
    assert [one.seq_id for one in replay] == [1, 2]
    assert after == []


async def test_prune_keeps_what_is_younger_than_the_grace_time(bench: Bench) -> None:
    await _finish_steps(bench, 2)
    bench.clock.move(timedelta(minutes=59))
    assert await _prune(bench) == 0
    assert await bench.count(OperationResult) == 2


async def test_pruned_result_is_gone_but_the_repeat_still_finds_its_id(bench: Bench) -> None:
    first, _ = await _finish_steps(bench, 2)
    bench.clock.move(timedelta(hours=2))
    assert await _prune(bench) == 2
    assert await _prune(bench) == 0
    status = await bench.ledger.status(bench.tenant, first)
    assert (status.state, status.pruned) == (OperationState.DONE, True)
    assert await bench.ledger.result(bench.tenant, status) is None
    assert await bench.accept(1) == first


async def test_prune_keeps_payloads_that_a_replay_needs(bench: Bench) -> None:
    await _finish_steps(bench, 3)
    await _set_run(bench, snapshot_seq_id=1)
    bench.clock.move(timedelta(hours=2))
    await _prune(bench)
    async with bench.database.read() as session:
        replay = await bench.ledger.operations_to_replay(
            session, bench.run, "a trainer", after_seq_id=1, before_seq_id=100
        )
    assert [one.seq_id for one in replay] == [2, 3]
    assert await bench.count(OperationPayload) == 2


async def test_payload_that_outlives_its_result_goes_once_a_snapshot_covers_it(bench: Bench) -> None:
    await _finish_steps(bench, 3)
    await _set_run(bench, snapshot_seq_id=1)
    bench.clock.move(timedelta(hours=2))
    await _prune(bench)
    await _set_run(bench, snapshot_seq_id=2)
    assert await _prune(bench) == 0
    assert await bench.count(OperationPayload) == 1
    await _set_run(bench, state=RunState.UNLOADED)
    await _prune(bench)
    assert await bench.count(OperationPayload) == 0


async def test_prune_drops_payloads_of_unloaded_runs_samples_and_failures(bench: Bench) -> None:
    await _finish_steps(bench, 1)
    await bench.accept_sample("s:sample:0", 0)
    async with bench.database.read() as session:
        samples = await pending_samples(bench.ledger, session, BASE)
    await bench.finish(*samples, outcome=SampleOutput([]))
    await _set_run(bench, state=RunState.UNLOADED)
    bench.clock.move(timedelta(hours=2))
    await _prune(bench)
    assert await bench.count(OperationPayload) == 0
    assert await bench.count(OperationResult) == 0


async def test_prune_leaves_pending_work_and_reasons_of_failures(bench: Bench) -> None:
    rejected = await bench.reject(1)
    await bench.accept(2)
    bench.clock.move(timedelta(days=30))
    await _prune(bench)
    status = await bench.ledger.status(bench.tenant, rejected)
    assert status.error_message == "data must not be empty"
    assert [one.seq_id for one in await bench.ready()] == [2]


async def test_a_sample_that_cannot_be_read_does_not_hide_the_others(bench: Bench) -> None:
    damaged, whole = await bench.accept_sample("damaged", 1), await bench.accept_sample("whole", 1)
    async with bench.database.write() as transaction:
        await transaction.execute(
            update(OperationPayload).where(OperationPayload.operation_id == damaged).values(body=b"\xc1")
        )
    async with bench.database.read() as session:
        found = await bench.ledger.load(session, [damaged, whole])
    assert [(one.id, isinstance(one.payload, SampleRequest)) for one in found] == [(damaged, False), (whole, True)]
