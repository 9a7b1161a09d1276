"""The calls of ``tenants`` that requests, trainers, sampling processes and operators make."""

from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from bench.growth.calls import Named, Within, Years
from bench.ledger.calls import LedgerCalls
from bench.ledger.rows import BASE_MODEL, LEASE
from contracts.ids import CheckpointId, RequestId, RunId
from contracts.ledger_records import RunLease
from contracts.operations import LoraSettings
from contracts.paths import Segment
from store.clock import utc_now
from store.settings import Settings
from tenants.checkpoint_lists import CheckpointFilter, latest_checkpoints, list_checkpoints
from tenants.checkpoints import (
    NewCheckpoint,
    delete_checkpoint,
    find_checkpoint,
    get_checkpoint,
    new_checkpoint_id,
    newest_sampler_checkpoint,
    record_checkpoint,
)
from tenants.downloads import make_link
from tenants.followed_versions import followed_version
from tenants.gates import (
    Dispatch,
    GateMode,
    Pause,
    closed_gates,
    flights_of,
    in_flight,
    make_gates,
    mark_in_flight,
    pause_gate,
    pool_gate,
    resume_gate,
)
from tenants.keys import describe_key, pages_of_keys
from tenants.limit_use import RUN_USE, SAMPLE_USE, SESSION_USE, STORAGE_USE, TRAINING_USE
from tenants.limits import Counted, Limits, hold_count
from tenants.placements import count_placements, due_placements, place_runs, unplaced_runs
from tenants.recorded_folders import removable, unrecorded_folders
from tenants.run_directives import RunDirective, direct_run, directives_for
from tenants.run_history import RunEventKind, note_run_events, run_history, was_restored
from tenants.run_leases import claim_runs, count_runs, idle_runs, release_runs, runs_of_ended_sessions
from tenants.runs import NewRun, list_runs, open_run_within_limit, open_runs, run_standing
from tenants.sampled_versions import held_versions, sampled_versions, versions_followed
from tenants.samplers import NewSampler, create_sampler, point_sampler, publish_live
from tenants.sessions import (
    NewSession,
    create_session,
    finish_session,
    heartbeat,
    keep_session_alive,
    list_sessions,
    session_members,
)
from tenants.standing import standing
from tenants.suspensions import suspend_tenant, suspensions
from tenants.trainers import list_trainers
from tenants.training_snapshots import NewSnapshot, record_snapshot
from tenants.usage import usage
from testing.runs import create_run

_PAGE = 20
_DEFAULTS = Limits.of(Settings())


def tenants_group(_calls: LedgerCalls, years: Years) -> tuple[Named, Named]:
    """Return the reading and the writing calls of ``tenants``."""
    reads = {**_reads_of_clients(years), **_reads_of_processes(years), **_reads_of_operators(years)}
    return reads, {**_writes_of_clients(years), **_writes_of_processes(years)}


def _reads_of_clients(years: Years) -> dict[str, Within]:
    async def standing_of_run(session: AsyncSession) -> None:
        tenant, run, _ = years.active
        await run_standing(session, tenant, run, utc_now())

    async def find(session: AsyncSession) -> None:
        tenant, _, path = years.old_checkpoint
        await find_checkpoint(session, tenant, path, utc_now)

    async def get(session: AsyncSession) -> None:
        tenant, checkpoint, _ = years.old_checkpoint
        await get_checkpoint(session, tenant, checkpoint, utc_now)

    async def newest(session: AsyncSession) -> None:
        tenant, _, path = years.old_checkpoint
        await newest_sampler_checkpoint(session, tenant, RunId(path.run_id), utc_now)

    async def of_run(session: AsyncSession) -> None:
        tenant, _, path = years.old_checkpoint
        await list_checkpoints(session, CheckpointFilter(tenant, utc_now(), run_id=path.run_id), limit=_PAGE)

    async def latest(session: AsyncSession) -> None:
        tenant, _, path = years.old_checkpoint
        await latest_checkpoints(session, tenant, [path.run_id], utc_now)

    async def members(session: AsyncSession) -> None:
        await session_members(session, *years.old_session)

    return {
        "run_standing": standing_of_run,
        "find_checkpoint": find,
        "get_checkpoint": get,
        "newest_checkpoint": newest,
        "checkpoints_of_run": of_run,
        "latest_checkpoints": latest,
        "session_members": members,
        "list_sessions": lambda session: list_sessions(session, years.tenant, limit=_PAGE, offset=0),
        "list_runs": lambda session: list_runs(session, years.tenant, limit=_PAGE, offset=0),
        "list_checkpoints": lambda session: list_checkpoints(
            session, CheckpointFilter(years.tenant, utc_now()), limit=_PAGE
        ),
        "standing": lambda session: standing(session, years.tenant, _DEFAULTS, utc_now()),
        "storage_use": lambda session: STORAGE_USE.of(session, years.tenant, _DEFAULTS),
        "training_use": lambda session: TRAINING_USE.of(session, years.tenant, _DEFAULTS),
        "session_use": lambda session: SESSION_USE.of(session, years.tenant, _DEFAULTS),
        "run_use": lambda session: RUN_USE.of(session, years.tenant, _DEFAULTS),
    }


def _reads_of_processes(years: Years) -> dict[str, Within]:
    async def drawn(session: AsyncSession) -> None:
        await sampled_versions(session, [years.live_sampler[:2] for _ in range(16)], utc_now)

    async def published(session: AsyncSession) -> None:
        tenant, _, run = years.live_sampler
        await followed_version(session, tenant, run, utc_now)

    async def idle(session: AsyncSession) -> None:
        await idle_runs(session, LEASE.trainer, idle_since=utc_now() - timedelta(hours=6), most=64)

    async def folders(session: AsyncSession) -> None:
        await unrecorded_folders(session, [f"checkpoints/{years.old_checkpoint[1]}" for _ in range(64)])

    return {
        "sampled_versions": drawn,
        "followed_version": published,
        "versions_followed": lambda session: versions_followed(session, [years.live_sampler[1]], utc_now),
        "closed_gates": lambda session: closed_gates(session, "old", utc_now),
        "in_flight": lambda session: in_flight(session, years.old_run[1]),
        "flights_of": lambda session: flights_of(session, [years.old_run[1]]),
        "open_runs": lambda session: open_runs(session, BASE_MODEL),
        "count_runs": lambda session: count_runs(session, [LEASE.trainer]),
        "idle_runs": idle,
        "runs_of_ended_sessions": lambda session: runs_of_ended_sessions(session, LEASE.trainer),
        "unplaced_runs": lambda session: unplaced_runs(session, BASE_MODEL),
        "count_placements": lambda session: count_placements(session, BASE_MODEL),
        "due_placements": lambda session: due_placements(session, announced_before=utc_now()),
        "directives_for": lambda session: directives_for(session, LEASE.trainer),
        "was_restored": lambda session: was_restored(session, years.old_run[1], 1),
        "suspensions": suspensions,
        "unrecorded_folders": folders,
        "removable_folders": lambda session: removable(session, discarded_before=utc_now(), most=100),
    }


def _reads_of_operators(years: Years) -> dict[str, Within]:
    async def key(session: AsyncSession) -> None:
        await describe_key(session, years.tenant, years.turn(64))

    async def all_keys(session: AsyncSession) -> None:
        async for _page in pages_of_keys(session, years.tenant):
            pass

    return {
        "usage_of_a_week": lambda session: usage(session, since=utc_now().date() - timedelta(days=6)),
        "run_history": lambda session: run_history(session, years.old_run[1]),
        "list_trainers": lambda session: list_trainers(session, utc_now),
        "list_keys": all_keys,
    }


def _writes_of_clients(years: Years) -> dict[str, Within]:
    async def open_session(transaction: AsyncSession) -> None:
        await hold_count(transaction, Counted.SESSIONS, [tenant := years.tenant])
        await create_session(transaction, tenant, NewSession([], None, "0.38.0", None, None), utc_now)

    async def beat(transaction: AsyncSession) -> None:
        tenant, sampler, _ = years.live_sampler
        await heartbeat(transaction, tenant, sampler.partition(":")[0], utc_now)

    async def end_session(transaction: AsyncSession) -> None:
        tenant, session = years.old_session
        await finish_session(transaction, tenant, session, reason="finished", detail=None, clock=utc_now)

    async def new_sampler(transaction: AsyncSession) -> None:
        tenant, session = years.old_session
        await create_sampler(transaction, tenant, NewSampler(session, 7, "old"), utc_now)

    async def new_run(transaction: AsyncSession) -> None:
        tenant, session = years.old_session
        lora = LoraSettings(rank=8, alpha=32.0, seed=1, train_attn=True, train_mlp=True, train_unembed=True)
        run = await create_run(transaction, tenant, NewRun(session, 7, "old", lora, None), utc_now)
        await open_run_within_limit(transaction, tenant, run, _DEFAULTS)

    async def save(transaction: AsyncSession) -> None:
        tenant, _, path = years.old_checkpoint
        made = NewCheckpoint(
            new_checkpoint_id(), RunId(path.run_id), Segment.SAMPLER_WEIGHTS, path.name, 1, None, True, None
        )
        await record_checkpoint(transaction, tenant, made, utc_now)

    async def delete(transaction: AsyncSession) -> None:
        tenant, _, path = years.old_checkpoint
        await delete_checkpoint(transaction, tenant, path, utc_now)

    async def link(transaction: AsyncSession) -> None:
        tenant, _, path = years.old_checkpoint
        await make_link(transaction, tenant, path, utc_now)

    return {
        "create_session": open_session,
        "heartbeat": beat,
        "keep_session_alive": lambda transaction: keep_session_alive(transaction, years.live_sampler[1], utc_now),
        "finish_session": end_session,
        "create_sampler": new_sampler,
        "create_run": new_run,
        "record_checkpoint": save,
        "delete_checkpoint": delete,
        "make_link": link,
        "sample_room": lambda transaction: _sample_room(transaction, years),
        "suspend_tenant": lambda transaction: suspend_tenant(
            transaction, name=years.name, reason="unpaid", now=utc_now()
        ),
    }


async def _sample_room(transaction: AsyncSession, years: Years) -> None:
    tenants = {years.tenant for _ in range(8)}
    await hold_count(transaction, Counted.SAMPLES, tenants)
    await SAMPLE_USE.read(transaction, tenants, _DEFAULTS)


def _writes_of_processes(years: Years) -> dict[str, Within]:
    async def publish(transaction: AsyncSession) -> None:
        tenant, _, run = years.live_sampler
        await publish_live(transaction, tenant, run, CheckpointId(years.old_checkpoint[1]), utc_now)

    async def point(transaction: AsyncSession) -> None:
        await point_sampler(transaction, years.live_sampler[1], CheckpointId(years.old_checkpoint[1]))

    async def held(transaction: AsyncSession) -> None:
        await held_versions(transaction, [years.live_sampler[:2] for _ in range(16)], utc_now)

    async def enter(transaction: AsyncSession) -> None:
        tenant, run = years.old_run
        dispatch = Dispatch(RequestId("one"), tenant, "old", run, "v", "a replica", "a pool")
        await make_gates(transaction, dispatch, utc_now)
        await mark_in_flight(transaction, [dispatch], utc_now)

    async def pause(transaction: AsyncSession) -> None:
        tenant, run = years.old_run
        await pause_gate(transaction, run, tenant=tenant, base_model="old", pause=Pause(GateMode.KEEP), clock=utc_now)
        await resume_gate(transaction, run, generation=None, clock=utc_now)

    async def pause_pool(transaction: AsyncSession) -> None:
        pause = Pause(GateMode.KEEP)
        await pause_gate(transaction, pool_gate("old"), tenant=None, base_model="old", pause=pause, clock=utc_now)
        await closed_gates(transaction, "old", utc_now)

    async def claim(transaction: AsyncSession) -> None:
        await release_runs(transaction, LEASE.trainer, [years.waiting for _ in range(8)], utc_now())
        await claim_runs(transaction, "another trainer", BASE_MODEL, 8, utc_now())

    async def snapshot(transaction: AsyncSession) -> None:
        tenant, run, seq_id = years.active
        made = NewSnapshot(run, tenant, RunLease(LEASE.trainer, LEASE.token), seq_id - 1, "snapshots/new")
        await record_snapshot(transaction, made)

    async def note(transaction: AsyncSession) -> None:
        runs = [years.active[1] for _ in range(8)]
        await note_run_events(transaction, runs, RunEventKind.RELEASED, trainer=LEASE.trainer, now=utc_now())

    async def direct(transaction: AsyncSession) -> None:
        await direct_run(transaction, years.active[1], RunDirective.MOVE, now=utc_now())

    return {
        "publish_live": publish,
        "point_sampler": point,
        "held_versions": held,
        "mark_in_flight": enter,
        "pause_and_resume": pause,
        "pause_pool": pause_pool,
        "release_and_claim_runs": claim,
        "place_runs": lambda transaction: place_runs(transaction, [years.active[1]], utc_now()),
        "record_snapshot": snapshot,
        "note_run_events": note,
        "direct_run": direct,
    }
