"""The work of each step of housekeeping. A step's failure is its own: no other step shares its transactions."""

import asyncio
from collections.abc import Callable
from datetime import UTC, timedelta

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import SessionEnded
from ledger.cancellation import OfEndedKeys, OfEndedSessions, OfSilentSessions, client_silent, session_ended
from ledger.ended_keys import key_ended
from ledger.gaps import close_gaps
from ledger.pruning import PRUNE_BATCH, drop_covered_payloads, forget_operations, prune
from ledger.runtime import Runtime
from ledger.wakeups import gates_topic, recalls_topic
from store.tables import VersionCommand
from store.walk import Place
from telemetry.security import SecurityEvent, SecurityRecord, note
from tenants.audit_digests import (
    DayDigest,
    DayHash,
    begin_digest,
    close_day,
    expire_entries,
    store_digest,
    undigested_day,
)
from tenants.checkpoint_holds import release_holds
from tenants.checkpoints import forget_deletions
from tenants.downloads import delete_expired_links
from tenants.ended_processes import delete_ended_processes
from tenants.gates import open_expired
from tenants.login_codes import delete_expired_codes
from tenants.looks import forget_looks
from tenants.operator_answers import forget_answers
from tenants.operator_sessions import delete_ended_operator_sessions, delete_expired_operator_codes
from tenants.presence import was_present
from tenants.run_directives import delete_stale_directives
from tenants.run_history import delete_run_events
from tenants.run_retention import drop_snapshots, end_runs, forget_runs, forget_sessions
from tenants.sample_records import forget_sample_records
from tenants.sessions import end_silent_sessions
from tenants.storage_hours import StorageWalk, begin_walk, meter_storage
from tenants.usage_hours import forget_usage
from tenants.version_retention import VersionRules, delete_expired, retire_versions
from tenants.web_sessions import delete_ended_sessions
from tenants.webhook_events import forget_events, tell_expiries
from tenants.weight_jobs import forget_jobs
from workers.housekeeping.folders import FolderRemoval
from workers.housekeeping.schedule import StepName
from workers.housekeeping.step import LARGE, SMALL, Batch, Step, again
from workers.housekeeping.tenant_removal import remove_next_tenant
from workers.leases.reaper import reap_forsaken
from workers.webhooks.delivery import WebhookDelivery

_STALE_COMMAND = timedelta(hours=1)
"""Age at which a version command is deleted. No sender waits so long, so its sender has died."""

_STALE_DIRECTIVE = timedelta(days=1)
"""Age at which an operator's directive for a run is deleted. A trainer of the run would have carried it out."""

_METERED_TENANTS = 20
"""Most tenants whose storage one transaction meters: each may have twenty thousand checkpoints."""


class HousekeepingSteps:
    """The steps of one service. Every step raises ``Unavailable``, and may be run by several processes at once."""

    def __init__(self, runtime: Runtime, may_declare_dead: Callable[[], bool]) -> None:
        """Ask ``may_declare_dead`` whether this process may declare dead a process whose lease has ended (``reap_forsaken``)."""
        self._runtime = runtime
        self._may_declare_dead = may_declare_dead
        self.folders = FolderRemoval(runtime)
        self._webhooks = WebhookDelivery(runtime)
        self._hash: DayHash | None = None
        self._hashing = asyncio.Lock()
        works = {
            StepName.END_SESSIONS: self._end_sessions,
            StepName.DELETE_TENANTS: self._delete_tenants,
            StepName.CANCEL_SAMPLES: self._cancel_samples,
            StepName.CANCEL_SILENT_SAMPLES: self._cancel_silent_samples,
            StepName.END_RUNS: self._end_runs,
            StepName.CLOSE_GAPS: self._close_gaps,
            StepName.OPEN_GATES: self._open_gates,
            StepName.REAP_PROCESSES: self._reap_processes,
            StepName.EXPIRE_LINKS: self._expire_links,
            StepName.END_LOGINS: self._end_logins,
            StepName.EXPIRE_COMMANDS: self._expire_commands,
            StepName.EXPIRE_CHECKPOINTS: self._expire_checkpoints,
            StepName.FORGET_DELETIONS: self._forget_deletions,
            StepName.RETIRE_VERSIONS: self._retire_versions,
            StepName.REMOVE_SNAPSHOTS: self._remove_snapshots,
            StepName.RELEASE_CHECKPOINTS: self._release_checkpoints,
            StepName.EMPTY_TRASH: self._empty_trash,
            StepName.PRUNE_RESULTS: self._prune_results,
            StepName.DROP_PAYLOADS: self._drop_payloads,
            StepName.REMOVE_PAYLOAD_FILES: self._remove_payload_files,
            StepName.FORGET_OPERATIONS: self._forget_operations,
            StepName.FORGET_SAMPLE_RECORDS: self._forget_sample_records,
            StepName.FORGET_SESSIONS: self._forget_sessions,
            StepName.FORGET_RUNS: self._forget_runs,
            StepName.FORGET_EVENTS: self._forget_events,
            StepName.METER_STORAGE: self._meter_storage,
            StepName.FORGET_USAGE: self._forget_usage,
            StepName.DIGEST_AUDIT: self._digest_audit,
            StepName.FORGET_AUDIT: self._forget_audit,
            StepName.TELL_EXPIRIES: self._tell_expiries,
            StepName.SEND_WEBHOOKS: self._send_webhooks,
            StepName.FORGET_WEBHOOKS: self._forget_webhooks,
            StepName.REMOVE_ORPHANS: self._remove_orphans,
        }
        self.by_name = {name: Step(name, works[name]) for name in StepName}

    # --- what has ended --------------------------------------------------------------------------------------------

    async def _could_be_asked(self, session: AsyncSession, through: timedelta) -> bool:
        """Return whether clients could reach the service all through the last ``through``.

        Where they could not, their silence may have been the service's own: nobody could send a heartbeat or a request, nor
        fetch a result.
        """
        settings = self._runtime.settings
        return await was_present(
            session, now=self._runtime.clock(), session_timeout=settings.session_timeout, through=through
        )

    async def _end_sessions(self, _place: str | None) -> Batch:
        now, timeout = self._runtime.clock(), self._runtime.settings.session_timeout
        async with self._runtime.database.write() as transaction:
            if not await self._could_be_asked(transaction, timeout):
                return Batch(0)
            ended = await end_silent_sessions(transaction, silent_since=now - timeout, now=now, most=LARGE)
        return again(ended, LARGE)

    async def _delete_tenants(self, place: str | None) -> Batch:
        return await remove_next_tenant(self._runtime, place)

    async def _cancel_samples(self, _place: str | None) -> Batch:
        """Cancel the samples of ended sessions and of ended keys."""
        ledger, now = self._runtime.ledger, self._runtime.clock()
        async with self._runtime.database.write() as transaction:
            ended = await ledger.cancel(transaction, OfEndedSessions(), session_ended(), only_samples=True)
            ended += await ledger.cancel(transaction, OfEndedKeys(now), key_ended(), only_samples=True)
        return Batch(len(ended))

    async def _cancel_silent_samples(self, _place: str | None) -> Batch:
        now, silence = self._runtime.clock(), self._runtime.settings.sample_silence
        async with self._runtime.database.write() as transaction:
            if not await self._could_be_asked(transaction, silence):
                return Batch(0)
            silent = OfSilentSessions(now - silence)
            ended = await self._runtime.ledger.cancel(transaction, silent, client_silent(), only_samples=True)
        return Batch(len(ended))

    async def _end_runs(self, _place: str | None) -> Batch:
        ended_before = self._runtime.clock() - self._runtime.settings.result_grace
        async with self._runtime.database.write() as transaction:
            runs = await end_runs(transaction, ended_before=ended_before, most=SMALL)
            for run in runs:
                if not run.has_pending:
                    continue
                error = SessionEnded(f"the session of model {run.id} has ended ({run.reason}); open a new one")
                await self._runtime.ledger.fail_pending(transaction, run.id, error, unloads=True)
                if run.trainer is not None:
                    self._runtime.wakeups.announce_after_commit(transaction, recalls_topic(run.trainer))
        return again(len(runs), SMALL)

    async def _close_gaps(self, _place: str | None) -> Batch:
        now, grace = self._runtime.clock(), self._runtime.settings.gap_grace
        async with self._runtime.database.write() as transaction:
            if not await self._could_be_asked(transaction, grace):
                return Batch(0)
            quiet_since = now - grace
            runs = await close_gaps(transaction, self._runtime.wakeups, quiet_since=quiet_since, now=now)
        return Batch(runs, "more" if runs else None)

    async def _open_gates(self, _place: str | None) -> Batch:
        async with self._runtime.database.write() as transaction:
            opened = await open_expired(transaction, self._runtime.clock)
            for _, base_model in opened:
                self._runtime.ledger.wakeups.announce_after_commit(transaction, gates_topic(base_model))
        return Batch(len(opened))

    async def _reap_processes(self, _place: str | None) -> Batch:
        await reap_forsaken(self._runtime, may_declare_dead=self._may_declare_dead)
        return Batch(0)

    # --- what has expired ------------------------------------------------------------------------------------------

    async def _forget_sample_records(self, _place: str | None) -> Batch:
        now, settings = self._runtime.clock(), self._runtime.settings
        ended_before = now - settings.result_grace
        # The records of sessions that ended earlier have expired.
        ended_after = ended_before - settings.retention_sample_records
        async with self._runtime.database.write() as transaction:
            gone = await forget_sample_records(
                transaction, now=now, ended_after=ended_after, ended_before=ended_before, most=LARGE
            )
        return again(gone, LARGE)

    async def _expire_links(self, _place: str | None) -> Batch:
        async with self._runtime.database.write() as transaction:
            return again(await delete_expired_links(transaction, now=self._runtime.clock(), most=LARGE), LARGE)

    async def _end_logins(self, _place: str | None) -> Batch:
        now, idle = self._runtime.clock(), self._runtime.settings.web_session_idle
        async with self._runtime.database.write() as transaction:
            codes = await delete_expired_codes(transaction, now=now, most=LARGE)
            invited = await delete_expired_operator_codes(transaction, now=now, most=LARGE)
            ended = await delete_ended_sessions(transaction, now=now, idle=idle, most=LARGE)
            operators = await delete_ended_operator_sessions(transaction, now=now, most=LARGE)
            looks = await forget_looks(transaction, now=now, most=LARGE)
            return again(max(codes, invited, ended, operators, looks), LARGE)

    async def _expire_commands(self, _place: str | None) -> Batch:
        stale = (
            select(VersionCommand.id)
            .where(VersionCommand.created_at < self._runtime.clock() - _STALE_COMMAND)
            .limit(LARGE)
        )
        gone = delete(VersionCommand).where(VersionCommand.id.in_(stale)).returning(VersionCommand.id)
        async with self._runtime.database.write() as transaction:
            deleted = await transaction.execute(gone.execution_options(synchronize_session=False))
            return again(len(deleted.all()), LARGE)

    async def _expire_checkpoints(self, _place: str | None) -> Batch:
        async with self._runtime.database.write() as transaction:
            return again(await delete_expired(transaction, now=self._runtime.clock(), most=SMALL), SMALL)

    async def _forget_deletions(self, _place: str | None) -> Batch:
        before = self._runtime.clock() - self._runtime.settings.result_grace
        async with self._runtime.database.write() as transaction:
            deletions = await forget_deletions(transaction, before=before, most=LARGE)
            answers = await forget_answers(transaction, before=before, most=LARGE)
        return again(max(deletions, answers), LARGE)

    async def _retire_versions(self, place: str | None) -> Batch:
        now, settings = self._runtime.clock(), self._runtime.settings
        rules = VersionRules(
            newest=settings.retention_sampler_versions,
            idle_since=now - settings.retention_sampler_idle,
            ended_before=now - settings.result_grace,
        )
        async with self._runtime.database.write() as transaction:
            if not await self._could_be_asked(transaction, settings.retention_sampler_idle):
                return Batch(0)
            after = None if place is None else Place.parse(place)
            retired = await retire_versions(transaction, rules, now=now, after=after, most=SMALL)
        return Batch(retired.discarded, _text(retired.next))

    async def _remove_snapshots(self, _place: str | None) -> Batch:
        async with self._runtime.database.write() as transaction:
            folders = await drop_snapshots(transaction, most=SMALL)
        await self.folders.remove(folders)
        return again(len(folders), SMALL)

    async def _release_checkpoints(self, _place: str | None) -> Batch:
        async with self._runtime.database.write() as transaction:
            return again(await release_holds(transaction, most=LARGE), LARGE)

    async def _empty_trash(self, _place: str | None) -> Batch:
        return again(await self.folders.empty_trash(most=SMALL), SMALL)

    # --- what nobody asks for any more -----------------------------------------------------------------------------

    async def _prune_results(self, _place: str | None) -> Batch:
        now, grace = self._runtime.clock(), self._runtime.settings.result_grace
        async with self._runtime.database.write() as transaction:
            if not await self._could_be_asked(transaction, grace):
                return Batch(0)
            finished_before = now - grace
            return again(await prune(transaction, finished_before=finished_before, now=now), PRUNE_BATCH)

    async def _drop_payloads(self, _place: str | None) -> Batch:
        async with self._runtime.database.write() as transaction:
            runs = await drop_covered_payloads(transaction)
        return Batch(runs, "more" if runs else None)

    async def _remove_payload_files(self, place: str | None) -> Batch:
        removed, folder = await self._runtime.ledger.payloads.remove_forgotten(
            self._runtime.database, after=place or ""
        )
        return Batch(removed, folder)

    async def _forget_operations(self, place: str | None) -> Batch:
        before = self._runtime.clock() - self._runtime.settings.retention_operations
        async with self._runtime.database.write() as transaction:
            rows, further = await forget_operations(transaction, before=before, after=int(place or 0))
            rows += await forget_jobs(transaction, before=before, most=LARGE)
        return Batch(rows, None if further is None else str(further))

    async def _forget_sessions(self, place: str | None) -> Batch:
        before = self._runtime.clock() - self._runtime.settings.retention_sessions
        async with self._runtime.database.write() as transaction:
            after = None if place is None else Place.parse(place)
            forgotten = await forget_sessions(transaction, before=before, after=after, most=LARGE)
        return Batch(forgotten.rows, _text(forgotten.next))

    async def _forget_runs(self, place: str | None) -> Batch:
        now = self._runtime.clock()
        before = now - self._runtime.settings.retention_runs
        async with self._runtime.database.write() as transaction:
            after = None if place is None else Place.parse(place)
            forgotten = await forget_runs(transaction, before=before, now=now, after=after, most=SMALL)
        return Batch(forgotten.rows, _text(forgotten.next))

    async def _forget_events(self, _place: str | None) -> Batch:
        """Delete old events of runs' histories, processes that died long ago, and directives for runs that nobody trains."""
        now, kept = self._runtime.clock(), self._runtime.settings.retention_run_events
        async with self._runtime.database.write() as transaction:
            directives = await delete_stale_directives(transaction, before=now - _STALE_DIRECTIVE, most=LARGE)
            events = await delete_run_events(transaction, before=now - kept, most=LARGE)
            processes = await delete_ended_processes(transaction, before=now - kept, most=LARGE)
        return again(max(events, directives, processes), LARGE)

    async def _meter_storage(self, place: str | None) -> Batch:
        async with self._runtime.database.write() as transaction:
            walk = await begin_walk(transaction, self._runtime.clock()) if place is None else StorageWalk.parse(place)
            storing, further = await meter_storage(transaction, walk, most=_METERED_TENANTS)
        return Batch(storing, None if further is None else str(further))

    async def _forget_usage(self, _place: str | None) -> Batch:
        before = self._runtime.clock() - self._runtime.settings.retention_usage_hours
        async with self._runtime.database.write() as transaction:
            return again(await forget_usage(transaction, before=before, most=LARGE), LARGE)

    async def _digest_audit(self, _place: str | None) -> Batch:
        """Close the oldest day of the audit log that is over, or hash a page of it. Its digest goes to the security log, too.

        A day may have more entries than one batch has time for, so this process keeps what it has hashed for the next one.
        """
        # A step may run twice at once, and no page is hashed twice.
        async with self._hashing:
            async with self._runtime.database.read() as session:
                day = await undigested_day(session)
            if self._hash is not None and self._hash.day != day:
                self._hash = None
            if day is None:
                async with self._runtime.database.write() as transaction:
                    day = await close_day(transaction, now=self._runtime.clock())
            if day is None:
                return Batch(0)
            async with self._runtime.database.read() as session:
                self._hash = self._hash or await begin_digest(session, day)
                if await self._hash.add_page(session):
                    return Batch(0, "more")
            await self._keep_digest(self._hash.digest)
            self._hash = None
        return Batch(1, "more")

    async def _keep_digest(self, found: DayDigest) -> None:
        async with self._runtime.database.write() as transaction:
            is_first = await store_digest(transaction, found)
        if is_first:
            told = f"entries={found.entries} sha256={found.digest}"
            day = str(found.day)
            note(SecurityRecord(event=SecurityEvent.AUDIT_DIGEST, outcome="done", resource=day, detail=told))

    async def _forget_audit(self, _place: str | None) -> Batch:
        now = self._runtime.clock()
        before = (now - self._runtime.settings.retention_audit).astimezone(UTC).date()
        async with self._runtime.database.write() as transaction:
            return again(await expire_entries(transaction, before=before, now=now, most=LARGE), LARGE)

    async def _tell_expiries(self, place: str | None) -> Batch:
        async with self._runtime.database.write() as transaction:
            told, further = await tell_expiries(transaction, self._runtime.clock(), after=int(place or 0), most=LARGE)
        return Batch(told, None if further is None else str(further))

    async def _send_webhooks(self, _place: str | None) -> Batch:
        sent, is_more = await self._webhooks.deliver()
        return Batch(sent, "more" if is_more else None)

    async def _forget_webhooks(self, _place: str | None) -> Batch:
        before = self._runtime.clock() - self._runtime.settings.retention_webhook_events
        async with self._runtime.database.write() as transaction:
            return again(await forget_events(transaction, before=before, most=LARGE), LARGE)

    async def _remove_orphans(self, place: str | None) -> Batch:
        return await self.folders.remove_orphans(after=place or "")


def _text(place: Place | None) -> str | None:
    return None if place is None else str(place)
