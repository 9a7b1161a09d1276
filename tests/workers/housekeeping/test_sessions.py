"""Sessions end for their own silence, never for the service's."""

from datetime import timedelta

from sqlalchemy import select, update

from contracts.errors import ClientSilent, SessionEnded
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind, OptimStepped
from store.tables import Operation, Run, RunState, Session
from tenants.rights import SuspendMode
from tenants.sessions import heartbeat, keep_session_alive
from tenants.suspensions import resume_tenant, suspend_tenant
from tests.workers.housekeeping.conftest import House
from tests.workers.presence import be_present
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
    await house.sweep(after_silence=True)
    assert await _ended(house) == {kept: None, silent: None}
    await house.pass_time(timedelta(minutes=30))
    async with house.database.write() as transaction:
        await heartbeat(transaction, tenant, kept, house.clock)
    await house.pass_time(timedelta(minutes=31))
    await house.sweep()
    assert await _ended(house) == {kept: None, silent: "timed_out"}


async def test_after_an_outage_results_numbers_and_versions_have_their_whole_time_again(either_house: House) -> None:
    """A step ended as the service went down, and a request was under way: its client could not ask, nor send it again."""
    house = either_house
    tenant, session, run = await house.run("first")
    async with house.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.READY, next_seq_id=0))
    done = await house.operation(tenant, run, 0, OperationKind.OPTIM_STEP)
    await house.finish(done)
    behind = await house.operation(tenant, run, 2, OperationKind.OPTIM_STEP)
    versions = {await house.checkpoint(tenant, run, f"step-{step}", listed=False) for step in range(12)}
    await PresenceNotes(house.runtime).note()
    house.now += timedelta(hours=5)
    for _ in range(2):
        await house.keeping.sweep()
        await PresenceNotes(house.runtime).note()
    ledger = house.runtime.ledger
    assert await ledger.result(tenant, await ledger.status(tenant, done)) == OptimStepped({})
    assert await house.checkpoints() == versions
    async with house.database.read() as reading:
        assert list(await reading.scalars(select(Operation.id).order_by(Operation.seq_id))) == [done, behind]
    async with house.database.write() as transaction:
        await heartbeat(transaction, tenant, session, house.clock)
    await house.pass_time(timedelta(minutes=59))
    await house.keeping.sweep()
    assert (await ledger.status(tenant, done)).state is OperationState.DONE
    async with house.database.read() as reading:
        failed = select(Operation.seq_id).where(Operation.state == OperationState.FAILED)
        assert list(await reading.scalars(failed)) == [1], "the number's grace has passed, the result's not yet"
    assert len(await house.checkpoints()) < len(versions)
    await house.pass_time(timedelta(minutes=2))
    await house.keeping.sweep()
    assert (await ledger.status(tenant, done)).pruned


async def test_a_short_restart_of_the_service_is_no_silence(house: House) -> None:
    _, silent, _ = await house.run("first")
    await house.pass_time(timedelta(minutes=59))
    house.now += timedelta(seconds=80)
    await house.sweep()
    assert await _ended(house) == {silent: "timed_out"}


async def test_samples_of_a_client_that_went_silent_end_and_no_others(either_house: House) -> None:
    """A client that has never sent a heartbeat is not silent, and training goes on for as long as its session does."""
    house = either_house
    tenants = {name: await house.run(name) for name in ("killed", "alive", "without heartbeats")}
    samples = {}
    for name, (tenant, session, _) in tenants.items():
        sampler = await house.sampler(tenant, session, 0, None)
        samples[name] = tenant, await house.operation(tenant, sampler, 0, OperationKind.SAMPLE)
    tenant, _, run = tenants["killed"]
    trained = await house.operation(tenant, run, 0, OperationKind.OPTIM_STEP)
    await house.pass_time(timedelta(seconds=10))

    async def beat(*names: str) -> None:
        async with house.database.write() as transaction:
            for name in names:
                await heartbeat(transaction, *tenants[name][:2], house.clock)

    async def states() -> dict[str, str | None]:
        found = {name: await house.runtime.ledger.status(*sample) for name, sample in samples.items()}
        return {name: status.error_code for name, status in found.items() if status.state is OperationState.FAILED}

    await beat("killed", "alive")
    house.now += timedelta(minutes=3)
    await house.keeping.sweep()
    assert await states() == {}, "nobody could send a heartbeat while the service was away"
    await house.pass_time(timedelta(minutes=1))
    await beat("alive")
    await house.pass_time(timedelta(minutes=1, seconds=30))
    await house.sweep()
    assert await states() == {"killed": ClientSilent.code}
    assert (await house.runtime.ledger.status(tenant, trained)).state is OperationState.PENDING
    assert await _ended(house) == {session: None for _, session, _ in tenants.values()}


async def test_asking_and_following_are_signs_of_life_and_no_heartbeats(either_house: House) -> None:
    """A sample counts from its own request on, and a client that has followed one owes no heartbeat for the next."""
    house = either_house
    tenants = {name: await house.run(name) for name in ("gone", "back", "following", "trained on")}
    samplers = {name: await house.sampler(tenant, session, 0, None) for name, (tenant, session, _) in tenants.items()}
    await house.pass_time(timedelta(seconds=10))
    async with house.database.write() as transaction:
        for name in ("gone", "back"):
            await heartbeat(transaction, *tenants[name][:2], house.clock)
        await keep_session_alive(transaction, samplers["following"], house.clock)

    async def sample(name: str, number: int) -> tuple[TenantId, RequestId]:
        tenant = tenants[name][0]
        return tenant, await house.operation(tenant, samplers[name], number, OperationKind.SAMPLE)

    async def ended() -> set[str]:
        found = {name: await house.runtime.ledger.status(*one) for name, one in samples.items()}
        return {name for name, status in found.items() if status.error_code == ClientSilent.code}

    samples = {name: await sample(name, 0) for name in ("gone", "following", "trained on")}
    await house.pass_time(timedelta(minutes=5))
    samples["back"] = await sample("back", 0)
    await house.sweep()
    assert await ended() == {"gone"}
    await house.pass_time(timedelta(minutes=1, seconds=50))
    await house.sweep()
    assert await ended() == {"gone"}
    await house.pass_time(timedelta(seconds=20))
    await house.sweep()
    assert await ended() == {"gone", "back"}


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


async def test_a_blocked_tenants_silence_is_not_its_own(either_house: House) -> None:
    """Refused clients lose nothing that waits for them, and it has its whole time again afterwards. A neighbour just left."""
    house = either_house
    await be_present(house.runtime)
    tenants = [await house.run("first"), await house.run("second")]
    done, samples, versions = {}, {}, {}
    for tenant, session, run in tenants:
        async with house.database.write() as transaction:
            await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.READY, next_seq_id=0))
        done[run] = await house.operation(tenant, run, 0, OperationKind.OPTIM_STEP)
        await house.finish(done[run])
        await house.operation(tenant, run, 2, OperationKind.OPTIM_STEP)
        versions[run] = {await house.checkpoint(tenant, run, f"step-{step}", listed=False) for step in range(12)}
        sampler = await house.sampler(tenant, session, 0, None)
        samples[run] = await house.operation(tenant, sampler, 0, OperationKind.SAMPLE)
        house.now += timedelta(seconds=10)
        async with house.database.write() as transaction:
            await heartbeat(transaction, tenant, session, house.clock)
    async with house.database.write() as transaction:
        await suspend_tenant(transaction, name="first", reason=None, now=house.clock(), mode=SuspendMode.BLOCKED)

    async def sweep_after(time: timedelta) -> None:
        house.now += time
        await be_present(house.runtime)
        await house.keeping.sweep(until_done=True)

    async def lost(place: int) -> set[str]:
        tenant, session, run = tenants[place]
        found = {"session"} if (await _ended(house))[session] else set()
        if (await house.runtime.ledger.status(tenant, done[run])).pruned:
            found.add("result")
        if (await house.runtime.ledger.status(tenant, samples[run])).state is OperationState.FAILED:
            found.add("sample")
        async with house.database.read() as reading:
            failed = select(Operation.seq_id).where(Operation.lane == run, Operation.state == OperationState.FAILED)
            if 1 in await reading.scalars(failed):
                found.add("number")
        return found if versions[run] <= await house.checkpoints() else found | {"versions"}

    everything = {"session", "result", "sample", "number", "versions"}
    await sweep_after(timedelta(days=7))
    assert (await lost(0), await lost(1)) == (set(), everything)
    async with house.database.write() as transaction:
        await resume_tenant(transaction, name="first", now=house.clock())
    settings = house.runtime.settings
    await sweep_after(min(settings.gap_grace, settings.sample_silence) - timedelta(seconds=1))
    assert await lost(0) == set()
    await sweep_after(timedelta(days=7))
    assert await lost(0) == everything
