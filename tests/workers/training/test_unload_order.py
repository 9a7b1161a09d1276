"""An unload runs after everything that was accepted before it, whatever part of the ledger its trainer has read."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import EngineFailure, Unavailable
from contracts.ids import RequestId
from contracts.ledger_records import UNLOAD_SEQ_ID, Completion, OperationState
from contracts.operations import ModelUnloaded, OptimStep, TrainingBatch, UnloadModel
from ledger.wakeups import Wakeups
from tests.workers.training.conftest import DEADLINE, Client, NewRig, Rig
from tests.workers.training.test_directives import _is_listed, trainer_of, until
from tests.workers.training.test_worker import STEP, batch
from workers.leases.directives import Leaving

QUEUE: list[TrainingBatch | OptimStep] = [batch(1), STEP, batch(2), STEP]


@pytest.fixture
def rare_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no sweep make up for what a look has not read."""
    monkeypatch.setattr("workers.training.worker.SWEEP_SECONDS", 1000.0)


async def assert_all_done(client: Client, requests: Sequence[RequestId]) -> None:
    """Assert that the operations and the last one, which unloads the run, have ended well."""
    for request in requests[:-1]:
        status = await client.rig.ledger.wait_until_final(client.tenant, request, seconds=DEADLINE)
        assert status.state is OperationState.DONE, status.error_message
    assert isinstance(await client.result(requests[-1]), ModelUnloaded)


async def sent(client: Client) -> list[RequestId]:
    """Have the queue accepted at once."""
    async with client.rig.database.write() as transaction:
        return [await client.accept(transaction, payload) for payload in QUEUE]


def refuse_once(rig: Rig, client: Client) -> asyncio.Event:
    """Refuse the first completions of the client's run, as a lost connection does. Return an event that is set then."""
    complete, refused = rig.ledger.complete, asyncio.Event()

    async def broken(transaction: AsyncSession, completions: Sequence[Completion], **options: Any) -> set[str]:
        if completions[0].operation.lane == client.run and not refused.is_set():
            refused.set()
            raise Unavailable("the database does not answer")
        return await complete(transaction, completions, **options)

    rig.ledger.complete = broken  # type: ignore[method-assign]
    return refused


async def test_an_unload_waits_for_operations_of_a_run_that_was_dropped_before_it(new_rig: NewRig) -> None:
    """Every other look begins behind the unload alone. A neighbour trains on."""
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        refused = refuse_once(rig, client)
        requests = await sent(client)
        async with asyncio.timeout(DEADLINE):
            await refused.wait()
        requests.append(await client.send(UnloadModel(), seq_id=UNLOAD_SEQ_ID))
        beside = await sent(other)
        await assert_all_done(client, requests)
        for request in beside:
            await other.result(request)


async def test_an_unload_alone_in_memory_does_not_run_before_what_the_ledger_has(
    new_rig: NewRig, rare_sweeps: None
) -> None:
    """The trainer reads from behind the earlier operations, as one that has not heard of its claim. A neighbour trains on."""
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        async with rig.database.write() as transaction:
            requests = [await client.accept(transaction, payload) for payload in QUEUE]
            rig.worker._lanes.cursor = await transaction.scalar(text("SELECT max(position) FROM operations"))
            requests.append(await client.accept(transaction, UnloadModel(), seq_id=UNLOAD_SEQ_ID))
            beside = await other.accept(transaction, batch(1))
        await assert_all_done(client, requests)
        await other.result(beside)


async def test_an_unload_runs_behind_a_gap(new_rig: NewRig) -> None:
    """No operation can fill the gap any more: those behind it fail."""
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        behind = await client.send(STEP, seq_id=2)
        assert isinstance(await client.unload(), ModelUnloaded)
        with pytest.raises(EngineFailure, match="unloaded"):
            await client.result(behind)
        await other.do(batch(1))


async def test_a_run_that_is_handed_over_is_read_whole_at_once(
    new_rig: NewRig, migrated_postgres_url: str, rare_sweeps: None
) -> None:
    """The run's operations lie long before what its next trainer has read."""
    wakeups = Wakeups()
    home, away = (new_rig(url=migrated_postgres_url, wakeups=wakeups, lease=timedelta(seconds=60)) for _ in range(2))
    client = await home.client("client")
    await home.worker.leases.look()
    assert await trainer_of(home, client) == home.worker.leases.identity.id
    async with away.running():
        await until(lambda: _is_listed(away))
        requests = [client.created, *await sent(client)]
        away.worker._lanes.cursor = 10_000
        leaving = {client.run: Leaving(away.worker.leases.identity.id)}
        await home.worker.leases.releases.hand_over(leaving)
        for request in requests:
            await client.result(request)
        assert away.residency.holds(client.run)
