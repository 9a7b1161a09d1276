"""A trainer's releases: finds the training runs that the trainer should not keep, and ends its leases on them."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from contracts.ids import RunId
from ledger.runtime import Runtime
from ledger.wakeups import handed_over_topic, placements_topic
from ledger.work_in_hand import remove_record
from store.tables import ProcessKind
from tenants.placements import MOST_RUNS
from tenants.run_directives import lift_run_directives
from tenants.run_history import RunEventKind, note_run_events
from tenants.run_leases import hand_over_run, idle_runs, release_all_runs, release_runs, runs_of_ended_sessions
from workers.leases.directives import Leaving
from workers.leases.loads import read_loads
from workers.leases.processes import WorkerIdentity, alive, remove_processes
from workers.leases.reaper import reap_trainers

_IDLE = timedelta(seconds=30)
"""Time without a request before a run may move to another trainer. A move costs a restore at the next operation."""


class RunReleases:
    """Releases runs of one trainer. Every method raises ``Unavailable``."""

    def __init__(self, identity: WorkerIdentity, runtime: Runtime) -> None:
        self._identity = identity
        self._runtime = runtime

    async def ended(self) -> list[RunId]:
        """Return this trainer's runs whose session has ended: no client can train them any more."""
        async with self._runtime.database.read() as session:
            return await runs_of_ended_sessions(session, self._identity.id)

    async def surplus(self) -> list[RunId]:
        """Return idle runs beyond an even part of all runs: other trainers have fewer."""
        async with self._runtime.database.read() as session:
            loads = await read_loads(session, self._identity, self._runtime.clock)
            beyond = -loads.room(0)
            if beyond <= 0:
                return []
            idle_since = self._runtime.clock() - _IDLE
            return await idle_runs(session, self._identity.id, idle_since=idle_since, most=min(beyond, MOST_RUNS))

    async def release(self, runs: Sequence[str]) -> None:
        """Release idle runs; a run that gets work in this moment is placed for another trainer."""
        async with self._runtime.database.write() as transaction:
            await release_runs(transaction, self._identity.id, runs, self._runtime.clock())

    async def release_all_but(self, kept: Collection[str]) -> None:
        """Release every run except ``kept`` at an orderly end, and have other trainers look for them."""
        async with self._runtime.database.write() as transaction:
            await release_all_runs(transaction, self._identity.id, self._runtime.clock(), but=kept)
            topic = placements_topic(self._identity.base_model)
            self._runtime.wakeups.announce_after_commit(transaction, topic)

    async def hand_over(self, leaving: Mapping[RunId, Leaving]) -> None:
        """Pass each run to the trainer that an operator named, or release it where that trainer cannot take it."""
        runtime, now = self._runtime, self._runtime.clock()
        async with runtime.database.write() as transaction:
            takers = await alive(
                transaction, ProcessKind.TRAINER, self._identity.base_model, runtime.clock, takes_work=True
            )
            await lift_run_directives(transaction, list(leaving))
            rest: list[RunId] = []
            for run, told in leaving.items():
                if told.target not in takers or told.target is None:
                    rest.append(run)
                elif await hand_over_run(
                    transaction, self._identity.id, run, target=told.target, now=now, detail=told.reason
                ):
                    runtime.wakeups.announce_after_commit(transaction, handed_over_topic(told.target))
            await release_runs(transaction, self._identity.id, rest, now)
            topic = placements_topic(self._identity.base_model)
            runtime.wakeups.announce_after_commit(transaction, topic)

    async def note_evicted(self, runs: Sequence[RunId]) -> None:
        """Record that the runs' adapters are on disk, as an operator wanted. Their next operation brings them back."""
        async with self._runtime.database.write() as transaction:
            await lift_run_directives(transaction, runs)
            now = self._runtime.clock()
            await note_run_events(transaction, runs, RunEventKind.EVICTED, trainer=self._identity.id, now=now)

    async def give_up(self) -> None:
        """Release every run when this trainer cannot compute any more. An attempt is counted for what it has in hand."""
        async with self._runtime.database.write() as transaction:
            await reap_trainers(transaction, [self._identity.id], self._runtime)
            topic = placements_topic(self._identity.base_model)
            self._runtime.wakeups.announce_after_commit(transaction, topic)
        # Counted, and this process ends: nothing in the record counts again.
        await asyncio.to_thread(remove_record, self._runtime.data_folder, self._identity.id)

    async def release_all(self) -> None:
        """Release every run at an orderly end and remove this trainer, so that others need not wait for its lease to end."""
        async with self._runtime.database.write() as transaction:
            await release_all_runs(transaction, self._identity.id, self._runtime.clock())
            await remove_processes(transaction, [self._identity.id])
            topic = placements_topic(self._identity.base_model)
            self._runtime.wakeups.announce_after_commit(transaction, topic)
