"""Rows of what has ended go after their retention; those that are needed stay, and so does all of a second tenant."""

from datetime import timedelta

from sqlalchemy import select, update

from contracts.ids import CheckpointId, RunId, TenantId
from contracts.operations import OperationKind
from store.limit_settings import LimitSettings
from store.tables import (
    AdapterGate,
    Operation,
    OperationPayload,
    Placement,
    Run,
    RunMetric,
    RunPoint,
    RunState,
    Sampler,
    Session,
    UsageDay,
)
from tenants.followed_versions import followed_version
from tenants.gates import GateMode, Pause, pause_gate
from tenants.limits import Limits
from tenants.projects import create_project
from tenants.run_metrics import record_metrics
from tenants.run_points import PointPart, add_parts
from tenants.samplers import point_sampler
from tenants.sessions import finish_session, standing_session
from tests.workers.housekeeping.conftest import House

OPTIM, SAMPLE = OperationKind.OPTIM_STEP, OperationKind.SAMPLE


async def _everybody_beats(house: House) -> None:
    async with house.database.write() as transaction:
        await transaction.execute(update(Session).where(Session.ended_at.is_(None)).values(last_seen_at=house.now))


async def test_of_the_versions_of_each_step_only_the_newest_and_the_used_stay(either_house: House) -> None:
    house = either_house
    tenant, session, run = await house.run("first")
    other, other_session, other_run = await house.run("second")
    versions = []
    for step in range(12):
        version = await house.checkpoint(tenant, run, f"step-{step}", listed=False)
        versions.append((version, await house.sampler(tenant, session, step, version)))
        house.now += timedelta(seconds=10)
    named = await house.checkpoint(tenant, run, "named")
    theirs = await house.checkpoint(other, other_run, "theirs", listed=False)
    await house.sampler(other, other_session, 0, theirs)
    waiting, used = versions[0], versions[1]
    await house.operation(tenant, waiting[1], 0, SAMPLE)
    # A copy of the client, which has ended, counted from there.
    for copied in (used, versions[2]):
        await house.finish(await house.operation(tenant, copied[1], 1_000_000_000, SAMPLE))
    house.now += timedelta(hours=2)
    await house.finish(await house.operation(tenant, used[1], 1, SAMPLE))
    house.now += timedelta(minutes=20)
    await _everybody_beats(house)
    await house.sweep()
    await house.empty_trash()
    newest = {version for version, _ in versions[-house.runtime.settings.retention_sampler_versions :]}
    assert await house.checkpoints() == newest | {waiting[0], used[0], named, theirs}


async def test_old_operations_go_but_not_those_of_an_open_run_nor_the_usage(either_house: House) -> None:
    house = either_house
    tenant, session, run = await house.run("first")
    other, _, other_run = await house.run("second")
    version = await house.checkpoint(tenant, run, "named")
    sampler = await house.sampler(tenant, session, 0, version)
    await house.finish(await house.operation(tenant, sampler, 0, SAMPLE))
    await house.finish(await house.operation(tenant, run, 0, OPTIM))
    await house.finish(await house.operation(other, other_run, 0, OPTIM))
    async with house.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.UNLOADED))
    house.now += timedelta(hours=2)
    young = await house.operation(tenant, sampler, 1, SAMPLE)
    await _everybody_beats(house)
    await house.sweep()
    house.now += timedelta(hours=23)
    await _everybody_beats(house)
    await house.sweep()
    async with house.database.read() as reading:
        assert set(await reading.scalars(select(Operation.lane))) == {sampler, run, other_run}
    house.now += timedelta(hours=2)
    await _everybody_beats(house)
    await house.sweep()
    async with house.database.read() as reading:
        left = (await reading.execute(select(Operation.lane, Operation.seq_id))).all()
        used = sum(await reading.scalars(select(UsageDay.operations)))
    assert {tuple(row) for row in left} == {(sampler, 1), (other_run, 0)}
    assert used == 3
    assert await house.operation(tenant, sampler, 1, SAMPLE) == young, "a repeat of a young request finds it"


async def test_what_an_ended_run_leaves_goes_and_its_checkpoints_keep_it_listed(either_house: House) -> None:
    house = either_house
    tenant, session, bare = await house.run("first")
    _, _, open_run = await house.run("second")
    third, _, listed = await house.run("third")
    await house.checkpoint(third, listed, "kept")
    for run, state in ((bare, RunState.READY), (listed, RunState.READY), (open_run, RunState.READY)):
        house.folder.path(f"snapshots/{run}").mkdir(parents=True)
        values = {"state": state, "snapshot_dir": f"snapshots/{run}", "snapshot_bytes": 5}
        async with house.database.write() as transaction:
            await transaction.execute(update(Run).where(Run.id == run).values(values))
            await pause_gate(
                transaction, run, tenant=tenant, base_model="base", pause=Pause(GateMode.KEEP), clock=house.clock
            )
            transaction.add(Placement(run_id=run, tenant_id=tenant, base_model="base", created_at=house.now))
    async with house.database.write() as transaction:
        await transaction.execute(
            update(Session)
            .where(Session.id.not_in(select(Run.session_id).where(Run.id == open_run)))
            .values(ended_at=house.now)
        )
    house.now += timedelta(hours=2)
    await _everybody_beats(house)
    await house.sweep()
    assert house.folder.folders("snapshots") == [f"snapshots/{open_run}"]
    assert await house.count(Placement) == 1
    house.now += timedelta(days=91)
    await _everybody_beats(house)
    await house.sweep()
    await house.sweep()
    async with house.database.read() as reading:
        assert set(await reading.scalars(select(Run.id))) == {listed, open_run}
        assert set(await reading.scalars(select(AdapterGate.run_id))) == {listed, open_run}
        assert session not in set(await reading.scalars(select(Session.id)))
    assert await house.count(Session) == 2


async def test_points_and_metrics_go_with_their_run_in_small_batches(either_house: House) -> None:
    house = either_house
    tenant, _, ended = await house.run("first")
    other, _, kept = await house.run("second")
    async with house.database.write() as transaction:
        for run, owner in ((ended, tenant), (kept, other)):
            await add_parts(transaction, [PointPart(run, step, owner, at=house.now) for step in range(1, 1201)])
            values = {("reward", step): 1.0 for step in range(1200)}
            await record_metrics(transaction, owner, run, values, limits=Limits.of(LimitSettings()), now=house.now)
        await transaction.execute(update(Run).where(Run.id == ended).values(state=RunState.UNLOADED))
    house.now += timedelta(days=91)
    for _ in range(6):
        await _everybody_beats(house)
        await house.sweep()
    async with house.database.read() as reading:
        assert list(await reading.scalars(select(Run.id))) == [kept]
        assert set(await reading.scalars(select(RunPoint.run_id))) == {kept}
        assert set(await reading.scalars(select(RunMetric.run_id))) == {kept}


async def test_samplers_of_ended_sessions_go_once_no_operation_names_them(house: House) -> None:
    tenant, session, run = await house.run("first")
    version = await house.checkpoint(tenant, run, "named")
    await house.sampler(tenant, session, 0, version)
    used = await house.sampler(tenant, session, 1, version)
    await house.operation(tenant, used, 0, SAMPLE)
    async with house.database.write() as transaction:
        await transaction.execute(update(Session).values(ended_at=house.now))
    house.now += timedelta(days=31)
    await house.sweep()
    async with house.database.read() as reading:
        assert list(await reading.scalars(select(Sampler.id))) == [used]


async def test_samplers_of_clients_without_a_session_go_with_what_they_sample(either_house: House) -> None:
    """The session that serves OpenAI clients never ends while they are there."""
    house = either_house
    tenant, session, run = await house.run("first")
    other, _, other_run = await house.run("second")
    async with house.database.write() as transaction:
        own = await standing_session(transaction, tenant, "openai", house.clock)
        theirs = await standing_session(transaction, other, "openai", house.clock)
    brief = await house.checkpoint(tenant, run, "brief", ttl=3600)
    lasting = await house.checkpoint(tenant, run, "lasting")
    await house.sampler(tenant, own, 0, brief)
    used = await house.sampler(tenant, own, 1, brief)
    clients = await house.sampler(tenant, session, 0, brief)
    kept = {
        await house.sampler(tenant, own, 2, lasting),
        await house.sampler(other, theirs, 0, await house.checkpoint(other, other_run, "lasting")),
        clients,
    }
    await house.finish(await house.operation(tenant, used, 0, SAMPLE))
    for hours, left in ((2, kept | {used}), (48, kept)):
        house.now += timedelta(hours=hours)
        await _everybody_beats(house)
        await house.sweep()
        await house.sweep()
        async with house.database.read() as reading:
            assert set(await reading.scalars(select(Sampler.id))) == left


async def test_a_run_goes_that_only_clients_without_a_session_have_followed(either_house: House) -> None:
    house = either_house
    tenant, _, run = await house.run("first")
    other, other_session, other_run = await house.run("second")
    async with house.database.write() as transaction:
        own = await standing_session(transaction, tenant, "openai", house.clock)
        await transaction.execute(update(Run).values(state=RunState.UNLOADED))
    await house.sampler(tenant, own, 0, await house.checkpoint(tenant, run, "brief", ttl=3600), live=run)
    version = await house.checkpoint(other, other_run, "brief", ttl=3600)
    followed = await house.sampler(other, other_session, 0, version, live=other_run)
    house.now += timedelta(days=91)
    await _everybody_beats(house)
    await house.sweep()
    await house.sweep()
    async with house.database.read() as reading:
        assert list(await reading.scalars(select(Run.id))) == [other_run]
        assert list(await reading.scalars(select(Sampler.id))) == [followed]


async def _followed(house: House, tenant: TenantId, run: RunId) -> CheckpointId:
    async with house.database.read() as reading:
        return await followed_version(reading, tenant, run, house.clock)


async def test_a_run_whose_session_has_ended_is_followed_at_its_newest_version(either_house: House) -> None:
    """A live sampler stays for weeks, and the version without a name that it was at goes within hours."""
    house = either_house
    tenant, session, run = await house.run("first")
    other, other_session, other_run = await house.run("second")
    brief = await house.checkpoint(tenant, run, "step", listed=False)
    theirs = await house.checkpoint(other, other_run, "step", listed=False)
    await house.sampler(tenant, session, 0, brief, live=run)
    await house.sampler(other, other_session, 0, theirs, live=other_run)
    house.now += timedelta(seconds=10)
    final = await house.checkpoint(tenant, run, "final")
    await house.checkpoint(other, other_run, "final")
    assert await _followed(house, tenant, run) == brief
    async with house.database.write() as transaction:
        await finish_session(transaction, tenant, session, reason="finished", detail=None, clock=house.clock)
    assert await _followed(house, tenant, run) == final
    house.now += timedelta(hours=2)
    await _everybody_beats(house)
    await house.sweep()
    await house.empty_trash()
    assert brief not in await house.checkpoints()
    assert await _followed(house, tenant, run) == final
    assert await _followed(house, other, other_run) == theirs, "their session is open"


async def test_a_version_that_is_gone_is_not_followed_though_a_live_sampler_is_at_it(either_house: House) -> None:
    house = either_house
    tenant, session, run = await house.run("first")
    other, other_session, other_run = await house.run("second")
    lasting = await house.checkpoint(tenant, run, "lasting")
    house.now += timedelta(seconds=10)
    await house.sampler(tenant, session, 0, await house.checkpoint(tenant, run, "brief", ttl=60), live=run)
    theirs = await house.checkpoint(other, other_run, "brief", ttl=3600)
    await house.sampler(other, other_session, 0, theirs, live=other_run)
    for _ in range(2):
        house.now += timedelta(seconds=61)
        assert await _followed(house, tenant, run) == lasting
        assert await _followed(house, other, other_run) == theirs
        await house.sweep()


async def test_samplers_of_clients_without_a_session_hold_each_other_at_no_version(either_house: House) -> None:
    """A key of the whole tenant and one of a project have a standing session each."""
    house = either_house
    tenant, _, run = await house.run("first")
    other, other_session, other_run = await house.run("second")
    first = await house.checkpoint(tenant, run, "v1")
    theirs = await house.checkpoint(other, other_run, "v1")
    await house.sampler(other, other_session, 0, theirs, live=other_run)
    samplers = []
    async with house.database.write() as transaction:
        project = await create_project(transaction, tenant, "inside", house.clock)
        for place in (None, project.id):
            samplers.append(await standing_session(transaction, tenant, "openai", house.clock, project=place))
    made = [await house.sampler(tenant, own, 0, first, live=run) for own in samplers]
    house.now += timedelta(seconds=10)
    second = await house.checkpoint(tenant, run, "v2")
    await house.checkpoint(other, other_run, "v2")
    for sampler in made:
        assert await _followed(house, tenant, run) == second
        async with house.database.write() as transaction:
            await point_sampler(transaction, sampler, second)
    assert await _followed(house, other, other_run) == theirs, "a client's live sampler is there"


async def test_only_what_a_newer_snapshot_covers_is_visited(house: House) -> None:
    tenant, _, run = await house.run("first")
    other, _, other_run = await house.run("second")
    for seq_id in range(4):
        await house.finish(await house.operation(tenant, run, seq_id, OPTIM))
        await house.finish(await house.operation(other, other_run, seq_id, OPTIM))
    async with house.database.write() as transaction:
        await transaction.execute(update(Run).values(state=RunState.READY))
        await transaction.execute(update(Run).where(Run.id == run).values(snapshot_seq_id=1))
    house.now += timedelta(hours=2)
    await _everybody_beats(house)
    await house.sweep()
    async with house.database.read() as reading:
        kept = await reading.execute(
            select(Operation.lane, Operation.seq_id).join(
                OperationPayload, OperationPayload.operation_id == Operation.id
            )
        )
        assert {tuple(row) for row in kept} == {(run, 2), (run, 3), *((other_run, seq_id) for seq_id in range(4))}
        dropped = await reading.execute(select(Run.id, Run.payloads_dropped_to))
        assert {row.id: row.payloads_dropped_to for row in dropped} == {run: 1, other_run: -1}
