"""Sessions end for their own silence, never for the service's."""

from datetime import timedelta

from sqlalchemy import select, update

from contracts.errors import SessionEnded
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind
from store.tables import Run, RunState, Session
from tenants.sessions import heartbeat
from tests.workers.housekeeping.conftest import House
from workers.housekeeping.presence import PresenceNotes


async def _ended(house: House) -> dict[str, str | None]:
    async with house.database.read() as session:
        return {row.id: row.end_reason for row in await session.execute(select(Session.id, Session.end_reason))}


async def test_after_an_outage_every_session_has_its_whole_time_again(either_house: House) -> None:
    """The first to come back is housekeeping: no API process has answered yet."""
    house = either_house
    tenant, kept, _ = await house.run("first")
    _, silent, _ = await house.run("second")
    await PresenceNotes(house.runtime).note()
    house.now += timedelta(hours=5)
    await house.keeping.sweep()
    assert await _ended(house) == {kept: None, silent: None}
    await house.sweep()
    assert await _ended(house) == {kept: None, silent: None}
    await house.pass_time(timedelta(minutes=30))
    async with house.database.write() as transaction:
        await heartbeat(transaction, tenant, kept, house.clock)
    await house.pass_time(timedelta(minutes=31))
    await house.sweep()
    assert await _ended(house) == {kept: None, silent: "timed_out"}


async def test_a_short_restart_of_the_service_is_no_silence(house: House) -> None:
    _, silent, _ = await house.run("first")
    await house.pass_time(timedelta(minutes=59))
    house.now += timedelta(seconds=80)
    await house.sweep()
    assert await _ended(house) == {silent: "timed_out"}


async def test_work_behind_a_gap_ends_with_its_session(either_house: House) -> None:
    house = either_house
    tenant, session, run = await house.run("first")
    other, _, other_run = await house.run("second")
    await house.finish(await house.operation(tenant, run, 0, OperationKind.OPTIM_STEP))
    behind = await house.operation(tenant, run, 2, OperationKind.OPTIM_STEP)
    unload = await house.operation(tenant, run, 3, OperationKind.UNLOAD_MODEL)
    theirs = await house.operation(other, other_run, 2, OperationKind.OPTIM_STEP)
    async with house.database.write() as transaction:
        await transaction.execute(
            update(Session).where(Session.id == session).values(ended_at=house.now, end_reason="x")
        )
    await house.pass_time(timedelta(minutes=61))
    async with house.database.write() as transaction:
        await transaction.execute(update(Session).where(Session.id != session).values(last_seen_at=house.now))
    await house.sweep()
    for request in (behind, unload):
        status = await house.runtime.ledger.status(tenant, request)
        assert (status.state, status.error_code) == (OperationState.FAILED, SessionEnded.code)
    assert (await house.runtime.ledger.status(other, theirs)).state is OperationState.PENDING
    async with house.database.read() as reading:
        states = {row.id: row.state for row in await reading.execute(select(Run.id, Run.state))}
    assert states == {run: RunState.UNLOADED, other_run: RunState.CREATING}
