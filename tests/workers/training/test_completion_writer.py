"""Completions that the database refuses: the run is rebuilt from the ledger, another tenant's run goes on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import EngineFailure, Unavailable
from contracts.ids import RequestId, RunId
from contracts.ledger_records import Completion
from contracts.losses import LossName
from contracts.operations import (
    ForwardBackwardOutput,
    OptimStep,
    OptimStepped,
    SaveWeights,
    TrainingBatch,
    WeightsSaved,
)
from engine.model.base import BaseModel
from engine.training.adapter_state import AdapterState
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import Client, NewRig, Rig, undisturbed

STEP = OptimStep(learning_rate=1e-3)


def batch(seed: int) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, (6, 9))


@pytest.fixture(autouse=True)
def short_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep often: a dropped run comes back with the next sweep."""
    monkeypatch.setattr("workers.training.worker.SWEEP_SECONDS", 0.05)


@dataclass
class SqliteFault:
    """A database trigger that refuses one operation's result ``refusals`` times. Make it before the rig has connections."""

    rig: Rig
    refusals: float = float("inf")
    refused: int = 0
    request: list[RequestId] = field(default_factory=list)

    def __post_init__(self) -> None:
        @event.listens_for(self.rig.database.engine.sync_engine, "connect")
        def connected(connection, _record):  # type: ignore[no-untyped-def]
            connection.create_function("refuses", 1, self._refuses)

    def _refuses(self, request: str) -> bool:
        if request not in self.request or self.refused >= self.refusals:
            return False
        self.refused += 1
        return True

    async def arm(self) -> None:
        """Create the trigger."""
        async with self.rig.database.write() as transaction:
            await transaction.execute(
                text(
                    "CREATE TRIGGER refusal BEFORE INSERT ON operation_results WHEN refuses(NEW.operation_id) "
                    "BEGIN SELECT RAISE(ABORT, 'disk I/O error'); END"
                )
            )


def assert_trained(client: Client, expected: AdapterState) -> None:
    """Assert that each operation has counted once: weights and gradient within 1e-5, relative to their norms."""
    found = client.state()
    assert found.gradient is not None
    assert expected.gradient is not None
    for ours, theirs in ((found.weights.vector, expected.weights.vector), (found.gradient, expected.gradient)):
        assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm())


async def arm_postgres(rig: Rig, run: RunId, drops: int) -> None:
    """Have the server drop the connection that completes the run's operations, the first ``drops`` times.

    A sequence counts the times, for it is not rolled back.
    """
    for statement in (
        "CREATE SEQUENCE drops",
        "CREATE FUNCTION drop_connection() RETURNS trigger AS $$ BEGIN "
        f"IF NEW.lane = '{run}' AND nextval('drops') <= {drops} THEN PERFORM pg_terminate_backend(pg_backend_pid()); "
        "END IF; RETURN NEW; END $$ LANGUAGE plpgsql",
        "CREATE TRIGGER dropping BEFORE UPDATE ON operations FOR EACH ROW EXECUTE FUNCTION drop_connection()",
    ):
        async with rig.database.write() as transaction:
            await transaction.execute(text(statement))


async def test_a_refused_completion_drops_its_run_only_and_the_run_is_rebuilt(new_rig: NewRig, base: BaseModel) -> None:
    """Both tenants' results are written together at first. Refused twice: together, and alone."""
    rig = new_rig()
    fault = SqliteFault(rig, refusals=2)
    async with rig.running():
        client, other = await rig.clients("client", "other")
        await fault.arm()
        for one in (client, other):
            await one.do(batch(1))
        async with rig.database.write() as transaction:
            fault.request.append(await client.accept(transaction, batch(2)))
            beside = await other.accept(transaction, batch(2))
        for one, request in ((client, fault.request[0]), (other, beside)):
            assert isinstance(await one.result(request), ForwardBackwardOutput)
        assert fault.refused == 2
        assert rig.counts.paged_in == 1
        for one in (client, other):
            assert_trained(one, undisturbed(base, one.lora, [batch(1), batch(2)]))
            assert isinstance(await one.do(STEP), OptimStepped)


async def test_a_completion_refused_for_ever_fails_its_operation_and_holds_nobody_else_up(
    new_rig: NewRig, base: BaseModel
) -> None:
    """Other operations of its run, which are computed with it, count. Another tenant's run trains on meanwhile."""
    rig = new_rig()
    fault = SqliteFault(rig)
    async with rig.running():
        client, other = await rig.clients("client", "other")
        await fault.arm()
        async with rig.database.write() as transaction:
            before = await client.accept(transaction, batch(1))
            fault.request.append(await client.accept(transaction, batch(2)))
            behind = [await client.accept(transaction, one) for one in (batch(3), STEP)]
            requests = [await other.accept(transaction, one) for one in (batch(1), STEP, batch(2), STEP)]
        for request in requests:
            await other.result(request)
        with pytest.raises(EngineFailure, match="could not be recorded"):
            await client.result(fault.request[0])
        assert fault.refused <= 3 * 3, "each time with others, with its run's, and alone"
        assert isinstance(await client.result(before), ForwardBackwardOutput)
        for request in behind:
            await client.result(request)
        await client.do(batch(2))
        assert_trained(client, undisturbed(base, client.lora, [batch(1), batch(3), STEP, batch(2)]))


async def test_an_outage_fails_no_operation_however_often_it_refuses_a_completion(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, outages = new_rig(), 8
    complete = rig.ledger.complete

    async def away(transaction: AsyncSession, completions: Sequence[Completion], **options: Any) -> set[str]:
        nonlocal outages
        if outages and any(one.operation.lane == client.run for one in completions):
            outages -= 1
            raise Unavailable("the database does not answer")
        return await complete(transaction, completions, **options)

    async with rig.running():
        client, other = await rig.clients("client", "other")
        monkeypatch.setattr(rig.ledger, "complete", away)
        async with rig.database.write() as transaction:
            requests = [(one, await one.accept(transaction, batch(1))) for one in (client, other)]
        for one, request in requests:
            assert isinstance(await one.result(request), ForwardBackwardOutput)
        assert not outages
        for one in (client, other):
            assert_trained(one, undisturbed(base, one.lora, [batch(1)]))


async def test_a_save_refused_for_ever_fails_and_its_run_trains_on(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.training.adapter_tasks._PAUSE_SECONDS", 0.05)
    rig = new_rig()
    fault = SqliteFault(rig)
    async with rig.running():
        client, other = await rig.clients("client", "other")
        await fault.arm()
        async with rig.database.write() as transaction:
            fault.request.append(await client.accept(transaction, SaveWeights("refused")))
            behind = await client.accept(transaction, batch(1))
            beside = await other.accept(transaction, SaveWeights("fine"))
        assert isinstance(await other.result(beside), WeightsSaved)
        with pytest.raises(EngineFailure, match="could not be recorded"):
            await client.result(fault.request[0])
        assert fault.refused == 3
        assert isinstance(await client.result(behind), ForwardBackwardOutput)
        assert isinstance(await client.do(SaveWeights("refused")), WeightsSaved)


async def test_a_connection_dropped_in_the_middle_of_a_write_costs_no_result(
    new_rig: NewRig, base: BaseModel, migrated_postgres_url: str
) -> None:
    """PostgreSQL ends the session three times. Operations that were not committed are computed and written again, once."""
    rig = new_rig(url=migrated_postgres_url)
    async with rig.running():
        client, other = await rig.clients("client", "other")
        await arm_postgres(rig, client.run, drops=3)
        async with rig.database.write() as transaction:
            requests = [(one, await one.accept(transaction, batch(1))) for one in (client, other)]
        for one, request in requests:
            assert isinstance(await one.result(request), ForwardBackwardOutput)
        async with rig.database.read() as session:
            assert await session.scalar(text("SELECT last_value FROM drops")) > 3
        for one in (client, other):
            assert_trained(one, undisturbed(base, one.lora, [batch(1)]))
            assert isinstance(await one.do(STEP), OptimStepped)
