"""Last passes of a trainer in its row: true figures, not written with each pass, and told anew with a new lease."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version

import pytest
from sqlalchemy import delete, event

from contracts.losses import LossName
from contracts.operations import TrainingBatch
from store.clock import utc_now
from store.tables import ProcessKind, WorkerProcess
from tenants.trainers import TrainerStanding, list_trainers
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import Client, NewRig, Rig
from workers.leases.processes import new_identity, renew
from workers.training import trainer_report

LENGTHS = (6, 9, 13)
PASSES = 10


@pytest.fixture(autouse=True)
def told_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the report written at the worker's start, and then only when the test asks for it."""
    monkeypatch.setattr("workers.training.worker.TELL_SECONDS", 3600.0)


def batch(seed: int) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, LENGTHS)


async def told(rig: Rig) -> TrainerStanding:
    """Have the trainer tell, if it has to, and return what operators see of it."""
    await rig.worker._report.tell()
    async with rig.database.read() as session:
        found = {one.id: one for one in await list_trainers(session, utc_now)}
    return found[rig.worker.leases.identity.id]


async def together(*clients: Client) -> None:
    """Have a batch of each computed in one pass."""
    async with clients[0].rig.database.write() as transaction:
        requests = [await one.accept(transaction, batch(1)) for one in clients]
    for one, request in zip(clients, requests, strict=True):
        await one.result(request)


@contextmanager
def reports_of(rig: Rig) -> Iterator[list[str]]:
    """Note the statements that write a last pass meanwhile."""
    engine, noted = rig.database.engine.sync_engine, list[str]()

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE worker_processes") and "pass_tokens" in statement:
            noted.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield noted
    finally:
        event.remove(engine, "before_cursor_execute", note)


async def test_operators_see_a_trainers_last_pass_and_its_version(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tenants share a pass, then one has a pass alone. A trainer beside, which does nothing, has none."""
    monkeypatch.setattr(trainer_report, "PASS_SECONDS", 0.0)
    rig = new_rig()
    beside = new_identity(ProcessKind.TRAINER, "weft/other")
    async with rig.running():
        first, second = await rig.clients("first", "second")
        async with rig.database.write() as transaction:
            await renew(transaction, beside, lease=timedelta(hours=1), clock=utc_now)
        assert (await told(rig)).last_pass is None
        began = utc_now()
        await together(first, second)
        shared = (await told(rig)).last_pass
        assert shared is not None
        assert (shared.tenants, shared.adapters, shared.sequences) == (2, 2, 2 * len(LENGTHS))
        assert shared.tokens == 2 * sum(LENGTHS)
        assert shared.padding_share == pytest.approx(rig.counts.padding_share)
        assert began <= shared.ended_at <= utc_now()
        await together(second)
        alone = (await told(rig)).last_pass
        assert alone is not None
        assert (alone.tenants, alone.tokens) == (1, sum(LENGTHS))
        assert alone.ended_at > shared.ended_at
        async with rig.database.read() as session:
            found = {one.id: one for one in await list_trainers(session, utc_now)}
        assert (found[beside.id].last_pass, found[beside.id].release) == (None, version("weft"))


async def test_a_last_pass_is_written_now_and_then_and_not_with_each_pass(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig()
    async with rig.running():
        first, second = await rig.clients("first", "second")
        await told(rig)
        with reports_of(rig) as written:
            for _ in range(PASSES):
                await together(first)
                await told(rig)
            assert len(written) <= 1, "an operator's figure costs a write each pass"
            await together(first, second)
            monkeypatch.setattr(trainer_report, "PASS_SECONDS", 0.0)
            last = (await told(rig)).last_pass
            assert last is not None
            assert last.tenants == 2
            count = len(written)
            await told(rig)
            assert len(written) == count, "nothing is new"


async def test_a_trainer_whose_row_was_taken_away_tells_anew_with_its_new_lease(new_rig: NewRig) -> None:
    rig = new_rig()
    async with rig.running():
        first, second = await rig.clients("first", "second")
        await together(first, second)
        before = await told(rig)
        async with rig.database.write() as transaction:
            await transaction.execute(delete(WorkerProcess))
        rig.worker.leases._heartbeat._renewed = float("-inf")
        await rig.worker.leases.look()
        after = await told(rig)
        assert (after.residents, before.residents) == (2, 2)
        assert after.last_pass is not None
        assert after.last_pass.tokens == 2 * sum(LENGTHS)
