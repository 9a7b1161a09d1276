"""Points of runs' curves: every pass is in one point, once, whatever transactions complete it."""

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest_asyncio
from sqlalchemy import update

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
from store.tables import Run, RunState
from telemetry.telemetry import Telemetry
from tenants.run_points import LossPer, Point, points_after
from tenants.runs import NewRun, create_run
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from tests.ledger_heads import ready_heads
from tests.payloads import digest, stored

BASE = "test/tiny"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
PASS = TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [Datum(np.array([1]), np.array([2]), {})])
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
    passes = [
        (passed(2.0, weights__sum=2.0),),
        (ForwardBackwardOutput([], {"loss:sum": 8.0, "tokens:sum": 16.0, **RATES}),),
        (passed(4.0),),
        (passed(1.0, weights__sum=2.0), passed(3.0)),
        (),
    ]
    for outcomes in passes:
        await bench.accept(bench.run, *([PASS] * len(outcomes)), OptimStep())
        for outcome in (*outcomes, stepped(1)):
            await bench.end((bench.run, outcome))
    found = await bench.points(bench.run)
    assert [one.loss_per for one in found] == ["weight", "sampled_token", "token", "mixed", "nothing"]
    assert [one.mean_loss for one in found] == [1.0, 2.0, 0.5, 0.4, None]
    assert [one.sampling_kl for one in found] == [None, 0.25, None, None, None]
    assert found[1].sampled_tokens == 4


async def test_a_loss_that_is_not_finite_is_a_gap_and_no_later_point_has_it(bench: Bench) -> None:
    await bench.accept(bench.run, PASS, PASS, OptimStep(), PASS, OptimStep())
    for outcome in (passed(math.nan), passed(1.0), stepped(1), passed(4.0), stepped(2)):
        await bench.end((bench.run, outcome))
    assert [one.mean_loss for one in await bench.points(bench.run)] == [None, 0.5]


async def test_a_failed_step_leaves_its_passes_to_the_next(bench: Bench) -> None:
    await bench.accept(bench.run, PASS, OptimStep(), PASS, OptimStep())
    for outcome in (passed(4.0), EngineFailure("not finite"), passed(12.0), stepped(1)):
        await bench.end((bench.run, outcome))
    (point,) = await bench.points(bench.run)
    assert (point.step, point.mean_loss, point.tokens) == (1, 1.0, 16)


async def test_points_outlive_the_results(bench: Bench) -> None:
    await bench.accept(bench.run, PASS, OptimStep())
    await bench.end((bench.run, passed(4.0)))
    await bench.end((bench.run, stepped(1)))
    async with bench.database.write() as transaction:
        later = NOW + timedelta(days=1)
        assert await prune(transaction, finished_before=later, now=later) == 2
    assert [one.mean_loss for one in await bench.points(bench.run)] == [0.5]
