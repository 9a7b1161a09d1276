"""Points of runs' curves: every pass is in one point, once, whatever transactions complete it."""

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from sqlalchemy import String, select, text, update

from contracts.errors import EngineFailure, WeftError
from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import Completion, NewOperation
from contracts.losses import LossName
from contracts.operations import (
    Datum,
    ForwardBackwardOutput,
    LoraSettings,
    LossSpec,
    OperationKind,
    OptimStep,
    OptimStepped,
    Result,
    TrainingBatch,
)
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.pruning import prune
from ledger.wakeups import Wakeups
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.tables import Run, RunPoint, RunState
from telemetry.telemetry import Telemetry
from tenants.curves import Series, curve_points, rows_of_series
from tenants.run_points import LossPer, Point, points_after
from tenants.runs import NewRun
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.runs import create_run
from tests.ledger_heads import ready_heads
from tests.payloads import digest, stored

BASE = "test/tiny"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def pass_of(loss_fn: LossName) -> TrainingBatch:
    return TrainingBatch(LossSpec(loss_fn), [Datum(np.array([1]), np.array([2]), {})])


PASS, PPO = pass_of(LossName.CROSS_ENTROPY), pass_of(LossName.PPO)
RATES = {"sampling_kl:mean": 0.25, "ratio_outside:mean": 0.0, "ratio:max": 1.0, "sampled_tokens:sum": 4.0}


def clock() -> datetime:
    return NOW


def passed(loss: float, **metrics: float) -> ForwardBackwardOutput:
    named = {name.replace("__", ":"): value for name, value in metrics.items()}
    return ForwardBackwardOutput([], {"loss:sum": loss, "tokens:sum": 8.0, **named})


def kind_of(payload: TrainingBatch | OptimStep) -> OperationKind:
    return OperationKind.OPTIM_STEP if isinstance(payload, OptimStep) else OperationKind.FORWARD_BACKWARD


def stepped(count: int) -> OptimStepped:
    return OptimStepped({"grad_norm:max": 1.5, "step:max": float(count)})


@dataclass
class Bench:
    """A ledger with a run, and a second tenant's run."""

    database: Database
    ledger: Ledger
    run: RunId
    other: RunId

    async def accept(self, run: RunId, *payloads: TrainingBatch | OptimStep) -> list[RequestId]:
        """Accept the operations in order, after those that are there."""
        ids = []
        async with self.database.write() as transaction:
            for payload in payloads:
                row = await transaction.get_one(Run, run)
                seq_id, row.model_seq_id = row.model_seq_id, row.model_seq_id + 1
                tenant = TenantId(row.tenant_id)
                new = NewOperation(tenant, run, seq_id, kind_of(payload), BASE, stored(payload), digest(payload))
                ids.append(await self.ledger.accept(transaction, new))
        return ids

    async def end(self, *outcomes: tuple[RunId, Result | WeftError]) -> None:
        """Complete the head of each run, one after the other, in a single transaction for those of different runs."""
        async with self.database.read() as session:
            heads = {one.lane: one for one in await ready_heads(self.ledger, session, BASE)}
        async with self.database.write() as transaction:
            await self.ledger.complete(transaction, [Completion(heads[run], outcome) for run, outcome in outcomes])

    async def points(self, run: RunId) -> list[Point]:
        async with self.database.read() as session:
            return await points_after(session, run, 0, most=100)

    async def taken(self, steps: Sequence[Sequence[tuple[TrainingBatch, ForwardBackwardOutput]]]) -> list[Point]:
        """Have the passes of each step done, each by a transaction of its own, and the step; return the run's points."""
        for passes in steps:
            await self.accept(self.run, *(payload for payload, _ in passes), OptimStep())
            for outcome in (*(outcome for _, outcome in passes), stepped(1)):
                await self.end((self.run, outcome))
        return await self.points(self.run)


@pytest_asyncio.fixture
async def bench(database_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    database = Database(create_engine(database_url))
    ledger = Ledger(database, Wakeups(), clock, Telemetry.of("test", clock), PayloadFiles(DataFolder(tmp_path)))
    runs = []
    async with database.write() as transaction:
        for name in ("cats", "dogs"):
            tenant = await create_tenant(transaction, name=name, clock=clock)
            session = await create_session(transaction, tenant, NewSession([], None, "raw", None, None), clock)
            # ``model_seq_id`` counts the operations of the test from 1 on.
            run = await create_run(transaction, tenant, NewRun(session, 1, BASE, LoraSettings(4, seed=1), None), clock)
            await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.READY, next_seq_id=1))
            runs.append(run)
    yield Bench(database, ledger, *runs)
    await database.close()


async def test_a_step_has_the_sums_of_its_passes_and_no_other_runs(bench: Bench) -> None:
    for run in (bench.run, bench.other):
        await bench.accept(run, PASS, PASS, OptimStep(learning_rate=0.5), PASS, OptimStep(learning_rate=0.25))
    await bench.end((bench.run, passed(3.0, weights__sum=2.0)), (bench.other, passed(100.0, weights__sum=1.0)))
    await bench.end((bench.run, passed(5.0, weights__sum=6.0)), (bench.other, EngineFailure("out of memory")))
    assert await bench.points(bench.run) == []
    await bench.end((bench.run, stepped(1)), (bench.other, stepped(1)))
    await bench.end((bench.run, passed(1.0, weights__sum=4.0)))
    await bench.end((bench.run, stepped(2)))
    first, second = await bench.points(bench.run)
    assert (first.step, first.loss_sum, first.loss_weight, first.mean_loss, first.tokens) == (1, 8.0, 8.0, 1.0, 16)
    assert (first.learning_rate, first.grad_norm, first.adapter_step, first.at) == (0.5, 1.5, 1, NOW)
    assert (second.step, second.mean_loss, second.learning_rate, second.loss_per) == (2, 0.25, 0.25, LossPer.WEIGHT)
    (theirs,) = await bench.points(bench.other)
    assert (theirs.mean_loss, theirs.tokens) == (100.0, 8)


async def test_operations_of_one_run_in_one_transaction_are_told_apart(bench: Bench) -> None:
    work = [PASS, OptimStep(), PASS, OptimStep()]
    ids = await bench.accept(bench.run, *work)
    async with bench.database.read() as session:
        (head,) = await ready_heads(bench.ledger, session, BASE)
    outcomes = (passed(2.0, weights__sum=2.0), stepped(1), passed(6.0, weights__sum=2.0), stepped(2))
    completions = [
        Completion(replace(head, id=id, seq_id=number + 1, kind=kind_of(payload), payload=payload), outcome)
        for number, (id, payload, outcome) in enumerate(zip(ids, work, outcomes, strict=True))
    ]
    async with bench.database.write() as transaction:
        await bench.ledger.complete(transaction, completions)
    assert [(one.step, one.mean_loss) for one in await bench.points(bench.run)] == [(1, 1.0), (2, 3.0)]


async def test_what_a_loss_is_divided_by_is_told(bench: Bench) -> None:
    steps = [
        [(PASS, passed(2.0, weights__sum=2.0))],
        [(PPO, ForwardBackwardOutput([], {"loss:sum": 8.0, "tokens:sum": 16.0, **RATES}))],
        [(PASS, passed(4.0))],
        [(PASS, passed(1.0, weights__sum=2.0)), (PASS, passed(3.0))],
        [],
    ]
    found = await bench.taken(steps)
    assert [one.loss_per for one in found] == ["weight", "sampled_token", "token", "mixed", "nothing"]
    assert [one.mean_loss for one in found] == [1.0, 2.0, 0.5, 0.4, None]
    assert [one.sampling_kl for one in found] == [None, 0.25, None, None, None]
    assert found[1].sampled_tokens == 4


@pytest.mark.parametrize(
    ("payload", "per", "metric"),
    [(PASS, LossPer.WEIGHT, "weights__sum"), (PPO, LossPer.SAMPLED_TOKEN, "sampled_tokens__sum")],
    ids=["weights", "sampled_tokens"],
)
async def test_a_pass_that_counts_nothing_leaves_the_mean_to_the_others(
    bench: Bench, payload: TrainingBatch, per: LossPer, metric: str
) -> None:
    """A step of such passes alone has no mean."""
    empty, whole = (payload, passed(0.0, **{metric: 0.0})), (payload, passed(6.0, **{metric: 4.0}))
    found = await bench.taken([[whole, empty], [empty, whole], [empty]])
    assert [(one.mean_loss, one.loss_weight, one.loss_per) for one in found] == [(1.5, 4.0, per)] * 2 + [
        (None, 0.0, per)
    ]
    async with bench.database.read() as session:
        curve = await curve_points(session, rows_of_series(bench.run, Series.MEAN_LOSS), 0, None, most=10)
    assert [(one.value, one.is_broken) for one in curve] == [(1.5, False), (1.5, False), (None, False)]


async def test_a_step_tells_its_passes_loss_functions_once_each_in_their_order(bench: Bench) -> None:
    """Each pass is completed by a transaction of its own."""
    steps = [
        [LossName.PPO, LossName.CROSS_ENTROPY, LossName.PPO],
        [LossName.IMPORTANCE_SAMPLING],
        [],
        list(reversed(LossName)),
    ]
    for run, chosen in ((bench.run, steps), (bench.other, [[LossName.DRO]])):
        for names in chosen:
            await bench.accept(run, *map(pass_of, names), OptimStep())
            for outcome in (*(passed(1.0) for _ in names), stepped(1)):
                await bench.end((run, outcome))
    assert [one.loss_fns for one in await bench.points(bench.run)] == [
        ["ppo", "cross_entropy"],
        ["importance_sampling"],
        [],
        [name.value for name in reversed(LossName)],
    ]
    assert [one.loss_fns for one in await bench.points(bench.other)] == [["dro"]]


async def test_loss_functions_of_one_transaction_are_told_once_and_their_sums_too(bench: Bench) -> None:
    names = [LossName.CISPO, LossName.PPO, LossName.CISPO, LossName.CROSS_ENTROPY]
    work = [*map(pass_of, names), OptimStep(0.5)]
    await bench.accept(bench.run, pass_of(LossName.PPO))
    await bench.end((bench.run, passed(1.0)))
    ids = await bench.accept(bench.run, *work)
    async with bench.database.read() as session:
        (head,) = await ready_heads(bench.ledger, session, BASE)
    outcomes = [*(passed(1.0) for _ in names), stepped(1)]
    completions = [
        Completion(replace(head, id=id, seq_id=number + 2, kind=kind_of(payload), payload=payload), outcome)
        for number, (id, payload, outcome) in enumerate(zip(ids, work, outcomes, strict=True))
    ]
    async with bench.database.write() as transaction:
        await bench.ledger.complete(transaction, completions)
    (point,) = await bench.points(bench.run)
    assert point.loss_fns == ["ppo", "cispo", "cross_entropy"]
    assert (point.loss_sum, point.tokens, point.learning_rate, point.grad_norm) == (5.0, 40, 0.5, 1.5)


def test_every_loss_function_fits_into_a_point() -> None:
    column = RunPoint.__table__.columns["loss_fns"].type
    assert isinstance(column, String)
    assert len(",".join(LossName)) <= (column.length or 0)


async def test_a_point_of_an_earlier_version_tells_no_loss_function(bench: Bench) -> None:
    """An earlier version's insert does not name the column. A pass that this one adds is told."""
    await bench.accept(bench.run, PASS, OptimStep())
    await bench.end((bench.run, passed(1.0)))
    async with bench.database.write() as transaction:
        columns = [column.name for column in RunPoint.__table__.columns if column.name not in ("loss_fns", "step")]
        named = ", ".join(columns)
        copied = f"INSERT INTO run_points (step, {named}) SELECT step + 1, {named} FROM run_points"
        await transaction.execute(text(copied))
    await bench.end((bench.run, stepped(1)))
    await bench.accept(bench.run, pass_of(LossName.DRO), OptimStep())
    async with bench.database.read() as session:
        found = (await session.scalars(select(RunPoint.loss_fns).order_by(RunPoint.step))).all()
    assert found == ["cross_entropy", ""]
    for outcome in (passed(1.0), stepped(2)):
        await bench.end((bench.run, outcome))
    assert [one.loss_fns for one in await bench.points(bench.run)] == [["cross_entropy"], ["dro"]]


async def test_a_loss_that_is_not_finite_is_a_gap_and_no_later_point_has_it(bench: Bench) -> None:
    await bench.accept(bench.run, PASS, PASS, OptimStep(), PASS, OptimStep())
    for outcome in (passed(math.nan), passed(1.0), stepped(1), passed(4.0), stepped(2)):
        await bench.end((bench.run, outcome))
    assert [one.mean_loss for one in await bench.points(bench.run)] == [None, 0.5]


@pytest.mark.parametrize("loss", [1.2e308, -1.2e308, 0.9e250])
async def test_finite_losses_beyond_every_sum_are_a_gap_and_no_error(bench: Bench, loss: float) -> None:
    """Each pass is completed by a transaction of its own, which the neighbour's operation shares."""
    for run in (bench.run, bench.other):
        await bench.accept(run, PASS, PASS, PASS, OptimStep(), PASS, OptimStep())
    huge = passed(loss, sampling_kl__mean=abs(loss) / 4, sampled_tokens__sum=4.0)
    for outcome in (huge, huge, huge, stepped(1), passed(4.0), stepped(2)):
        theirs = outcome if isinstance(outcome, OptimStepped) else passed(2.0)
        await bench.end((bench.run, outcome), (bench.other, theirs))
    first, second = await bench.points(bench.run)
    assert (first.mean_loss, first.loss_sum, first.sampling_kl, first.tokens) == (None, None, None, 24)
    assert (second.mean_loss, second.tokens) == (0.5, 8)
    assert [(one.loss_sum, one.tokens) for one in await bench.points(bench.other)] == [(6.0, 24), (2.0, 8)]


async def test_a_failed_step_leaves_its_passes_to_the_next(bench: Bench) -> None:
    await bench.accept(bench.run, PASS, OptimStep(), PASS, OptimStep())
    for outcome in (passed(4.0), EngineFailure("not finite"), passed(12.0), stepped(1)):
        await bench.end((bench.run, outcome))
    (point,) = await bench.points(bench.run)
    assert (point.step, point.mean_loss, point.tokens) == (1, 1.0, 16)


async def test_points_outlive_the_results(bench: Bench) -> None:
    await bench.taken([[(PPO, passed(4.0, sampled_tokens__sum=8.0))]])
    async with bench.database.write() as transaction:
        later = NOW + timedelta(days=1)
        assert await prune(transaction, finished_before=later, now=later) == 2
    assert [(one.mean_loss, one.loss_fns) for one in await bench.points(bench.run)] == [(0.5, ["ppo"])]
