"""The reaper: takes runs and samples from dead worker processes and deletes the processes' rows.

Processes reap dead peers of their own kind and base model. Housekeeping reaps the forsaken: dead processes that no
living peer has reaped.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from ledger.attempts import count_attempts
from ledger.runtime import Runtime
from ledger.sample_claims import return_samples_of
from ledger.untold import tell_of_trainer
from ledger.wakeups import cleared_samples_topic, sampling_topic
from ledger.work_in_hand import keep_record, read_record
from store.database import after_commit
from store.database_clock import database_now
from store.tables import ProcessKind, VersionCommand
from tenants.ended_processes import note_ended
from tenants.gates import clear_all_in_flight, samples_in_flight_of
from tenants.run_history import RunEventKind
from tenants.run_leases import release_all_runs
from tenants.sample_progress import mark_stale
from workers.leases.heartbeat import Heartbeat
from workers.leases.processes import EXITED_AT, lock_dead_peers, lock_expired, remove_processes

log = logging.getLogger(__name__)

_FORSAKEN_LEASES = 10
"""Leases after whose time a dead process counts as forsaken: every living peer has looked by then."""


async def reap_peers(runtime: Runtime, heartbeat: Heartbeat) -> None:
    """Reap dead processes of the heartbeat's kind and base model. Raises ``Unavailable``.

    A process that may not declare others dead reaps only processes that were reported dead.
    """
    kind, base_model = heartbeat.identity.kind, heartbeat.identity.base_model
    async with runtime.database.write() as transaction:
        now = await database_now(transaction, runtime.clock)
        latest = now if heartbeat.may_declare_dead else EXITED_AT
        dead = await lock_dead_peers(transaction, heartbeat.identity, latest)
        match kind:
            case ProcessKind.TRAINER:
                await reap_trainers(transaction, dead, runtime)
            case ProcessKind.POOL:
                await reap_pools(transaction, dead, base_model, runtime)
            case ProcessKind.API:
                await reap_apis(transaction, dead, runtime)


async def reap_forsaken(runtime: Runtime, *, may_declare_dead: Callable[[], bool]) -> None:
    """Reap the dead of every kind and base model whose lease ended ten leases ago. Raises ``Unavailable``.

    ``may_declare_dead`` tells whether this process was in touch with the database all the while. If it was not, no process is
    reaped: the processes that seem dead may only have been cut off from the database, as this one was.
    """
    async with runtime.database.write() as transaction:
        now = await database_now(transaction, runtime.clock)
        # Asked after the time was read, so that a database that halts between the two makes no process look dead.
        if not may_declare_dead():
            return
        dead = await lock_expired(transaction, now - _FORSAKEN_LEASES * runtime.settings.lease)
        trainers = [one.id for one in dead if one.kind is ProcessKind.TRAINER]
        await reap_trainers(transaction, trainers, runtime)
        for base_model in sorted({one.base_model for one in dead}):
            pools = [one.id for one in dead if (one.kind, one.base_model) == (ProcessKind.POOL, base_model)]
            await reap_pools(transaction, pools, base_model, runtime)
        await reap_apis(transaction, [one.id for one in dead if one.kind is ProcessKind.API], runtime)


async def reap_trainers(transaction: AsyncSession, dead: Sequence[str], runtime: Runtime) -> None:
    """Release the runs of dead trainers, whose rows the caller has locked, and delete the rows.

    An attempt is counted for each operation that a trainer had in hand. Clients are told of what it may have ended last.
    """
    for trainer in dead:
        suspects = await asyncio.to_thread(read_record, runtime.data_folder, trainer)
        await tell_of_trainer(transaction, trainer, runtime.wakeups, runtime.clock)
        # Runs before operations, as everywhere: in another order two transactions would wait for each other.
        runs = await release_all_runs(transaction, trainer, runtime.clock(), kind=RunEventKind.LOST)
        await count_attempts(transaction, suspects)
        await note_ended(transaction, [trainer], now=await database_now(transaction, runtime.clock), runs=runs)
        for _ in range(runs):
            after_commit(transaction, partial(runtime.telemetry.metrics.lease_moved, "expired"))
        after_commit(transaction, partial(runtime.telemetry.metrics.operations_suspected, len(suspects)))
        after_commit(transaction, partial(keep_record, runtime.data_folder, trainer))
        log.warning(
            "trainer %s is dead; its %d runs go to others, it had %d operations in hand", trainer, runs, len(suspects)
        )
    if dead:
        await remove_processes(transaction, dead)


async def reap_pools(transaction: AsyncSession, dead: Sequence[str], base_model: str, runtime: Runtime) -> None:
    """Remove dead sampling processes, whose rows the caller has locked; see ``remove_pools``.

    An attempt is counted for each sample that was in flight.
    """
    if dead:
        suspects = await samples_in_flight_of(transaction, dead)
        await count_attempts(transaction, suspects)
        after_commit(transaction, partial(runtime.telemetry.metrics.operations_suspected, len(suspects)))
        log.warning(
            "sampling processes %s are dead; their samples go to others, %d were in flight",
            ", ".join(dead),
            len(suspects),
        )
        now = await database_now(transaction, runtime.clock)
        for process in dead:
            drawn = await samples_in_flight_of(transaction, [process])
            await note_ended(transaction, [process], now=now, samples=len(drawn))
            await mark_stale(transaction, process)
        await remove_pools(transaction, dead, base_model, runtime)


async def reap_apis(transaction: AsyncSession, dead: Sequence[str], runtime: Runtime) -> None:
    """Delete the rows of dead API processes, which the caller has locked. They held nothing: each request is in the database."""
    if dead:
        log.warning("API processes %s are dead: killed, cut off from the database, or frozen", ", ".join(dead))
        await note_ended(transaction, dead, now=await database_now(transaction, runtime.clock))
        await remove_processes(transaction, dead)


async def remove_pools(transaction: AsyncSession, processes: Sequence[str], base_model: str, runtime: Runtime) -> None:
    """Delete sampling processes and their version commands, and return their samples for others to claim."""
    await return_samples_of(transaction, processes)
    for process in processes:
        await clear_all_in_flight(transaction, process)
    await transaction.execute(delete(VersionCommand).where(VersionCommand.process_id.in_(processes)))
    await remove_processes(transaction, processes)
    for topic in (sampling_topic(base_model), cleared_samples_topic(base_model)):
        runtime.wakeups.announce_after_commit(transaction, topic)
