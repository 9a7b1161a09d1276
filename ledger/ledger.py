"""The ledger: a table of accepted requests (operations), which trainers and samplers work off. The row is the truth.

Invariants:

- ``(lane, seq_id)`` is unique, so a repeated request finds its row.
- A run's operations run strictly by seq_id. ``runs.next_seq_id`` names the only one that may run.
- A result and the run's advance are written in one transaction.
- Wake-ups are announced after the commit and carry no data.

The SQL is in ``ledger.statements``. Samples are accepted in batches by ``ledger.sample_intake``. ``ledger.pruning`` deletes
results and payloads that nothing needs any more.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic, time

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.codec import decode_result, is_conflict
from contracts.errors import (
    NotFound,
    RunUnloaded,
    SequenceConflict,
    SessionEnded,
    Unavailable,
    UnreadableOperation,
    WeftError,
)
from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import (
    Completion,
    LanePosition,
    NewOperation,
    OperationState,
    OperationStatus,
    PendingOperation,
    ReadyOperation,
    RejectedOperation,
    RunLease,
)
from contracts.operations import OperationKind, Result
from ledger import statements as sql
from ledger.cancellation import EndedOperation, Selection, end_samples, end_training
from ledger.completions import check_final, lock_leased_runs, rows_of_outcomes
from ledger.payload_files import PayloadFiles
from ledger.pending_training import pending_after
from ledger.rows import (
    error_columns,
    new_row,
    payload_row,
    pending_operation,
    ready_operations,
    status_of,
    tokens_used,
)
from ledger.settlement import (
    Accepted,
    charge_own_lines,
    count_cut,
    insert_counted,
    insert_operation,
    settle,
    settle_cancelled,
)
from ledger.turns import advance, lock_runs
from ledger.wakeups import (
    Wakeups,
    cancelled_samples_topic,
    ended_samples_topic,
    operation_topic,
    placements_topic,
    recalls_topic,
    sampling_topic,
    trainer_topic,
)
from store.batcher import Batcher, few_lengths
from store.clock import Clock
from store.database import Database, after_commit, undo
from store.repeat import wait_for
from store.tables import Operation, Run
from telemetry.telemetry import Telemetry
from tenants.checkpoint_holds import resolve_when_accepted
from tenants.rates import Pace

log = logging.getLogger(__name__)


class Ledger:
    """Reads and writes operations. A method that is given no transaction or session opens its own."""

    def __init__(
        self, database: Database, wakeups: Wakeups, clock: Clock, telemetry: Telemetry, payloads: PayloadFiles
    ) -> None:
        self.payloads = payloads
        self._database = database
        self._telemetry = telemetry
        self.wakeups = wakeups
        self._clock = clock
        self._statuses: Batcher[tuple[TenantId, str], OperationStatus] = Batcher(self._read_statuses)

    # --- accepting -------------------------------------------------------------------------------------------------

    async def find(self, session: AsyncSession, *, lane: str, seq_id: int, digest: bytes) -> RequestId | None:
        """Return the request id of the operation with this key, or None. Raises ``SequenceConflict`` if its body differs."""
        row = (await session.execute(sql.FIND, {"lane": lane, "seq_id": seq_id})).one_or_none()
        if row is None:
            return None
        if is_conflict(row.body_digest, digest):
            raise SequenceConflict(f"seq_id {seq_id} was used before with another body; each seq_id names one request")
        return RequestId(row.id)

    async def accept(self, transaction: AsyncSession, new: NewOperation) -> RequestId:
        """Record ``new`` and return its request id; a repeated request gets its first id. Raises ``SequenceConflict``."""
        return (await self.accept_counted(transaction, new)).id

    async def accept_counted(self, transaction: AsyncSession, new: NewOperation, pace: Pace | None = None) -> Accepted:
        """Record ``new``, charged at its tenant's ``pace`` and in its lines, and count the tenant's pending training with it.

        A repeat of one that is charged undoes the transaction.
        """
        started = time()
        request_id = (accepted := await self._insert(transaction, new, pace if new.tokens else None)).id
        if new.kind is OperationKind.SAMPLE:
            self.wakeups.announce_after_commit(transaction, sampling_topic(new.base_model))
        else:
            await self._announce_training(transaction, new)
        if new.loads is not None and request_id == new.id:
            accepted = replace(accepted, loads_of=await resolve_when_accepted(transaction, new, self._clock))
        if self._telemetry.traces.is_on:
            after_commit(transaction, partial(self._telemetry.accepted, request_id, new.kind, started=started))
        return accepted

    async def _announce_training(self, transaction: AsyncSession, new: NewOperation | RejectedOperation) -> None:
        """Wake the run's trainer. A run without one gets a placement row, which is announced until a trainer claims the run."""
        if new.trainer is not None:
            topic = trainer_topic(new.trainer)
        else:
            topic = placements_topic(new.base_model)
            values = {"run_id": new.lane, "tenant_id": new.tenant, "base_model": new.base_model}
            placement = sql.PLACE_UNLESS_PRESENT[transaction.get_bind().dialect.name]
            await transaction.execute(placement, {**values, "created_at": self._clock()})
        self.wakeups.announce_after_commit(transaction, topic)

    async def reject(self, transaction: AsyncSession, rejected: RejectedOperation) -> RequestId:
        """Record a training operation as failed, so that later seq_ids of its run can run. Raises ``SequenceConflict``."""
        await lock_runs(transaction, [rejected.lane])
        request_id = (await self._insert(transaction, rejected)).id
        await advance(transaction, [rejected.lane], self._clock())
        await self._announce_training(transaction, rejected)
        return request_id

    async def _insert(
        self, transaction: AsyncSession, new: NewOperation | RejectedOperation, pace: Pace | None = None
    ) -> Accepted:
        state, now = OperationState.PENDING if isinstance(new, NewOperation) else OperationState.FAILED, self._clock()
        values = new_row(new, now, state)
        request_id = RequestId(str(values["id"]))
        inserted = await insert_operation(transaction, values, pace, now)
        if inserted is None:
            found = await self.find(transaction, lane=new.lane, seq_id=new.seq_id, digest=new.digest)
            if pace is not None:
                await undo(transaction)
            if found is None:
                # Housekeeping forgot the old row between both statements. A repeat inserts the new one.
                raise Unavailable("this request meets one that is being forgotten; send it again")
            return Accepted(found)
        if isinstance(new, RejectedOperation):
            return Accepted(request_id)
        row = payload_row(new)
        if new.kind is OperationKind.SAMPLE:
            await transaction.execute(sql.INSERT_PAYLOAD, row)
            return Accepted(request_id, rate=await charge_own_lines(transaction, new, inserted.rate, now))
        counted = {"operation": request_id, "owner": new.tenant, "payload": row["body"], "digest": row["file_digest"]}
        return await insert_counted(transaction, new, counted, inserted.rate, now)

    # --- running ---------------------------------------------------------------------------------------------------

    async def pending_training(
        self, session: AsyncSession, base_model: str, *, trainer: str, after_position: int, known: Collection[int] = ()
    ) -> list[PendingOperation]:
        """Return pending operations of the runs that ``trainer`` leases: see ``pending_after``."""
        return await pending_after(session, base_model, trainer, after_position, now=self._clock(), known=known)

    async def pending_of_runs(
        self, session: AsyncSession, base_model: str, runs: Collection[RunId], *, trainer: str, after_position: int
    ) -> list[PendingOperation]:
        """Return those of ``runs`` alone: see ``pending_training``."""
        return await pending_after(session, base_model, trainer, after_position, now=self._clock(), runs=runs)

    async def load(self, session: AsyncSession, ids: Sequence[RequestId]) -> list[ReadyOperation]:
        """Return the operations with their payloads decoded, oldest first. One whose file cannot be read now is left out."""
        return await ready_operations(session, sql.BY_ID, {"ids": list(ids)}, self.payloads, skips=True)

    async def lane_positions(self, session: AsyncSession, lanes: Sequence[str]) -> dict[str, LanePosition]:
        """Return how far each of the runs' lanes has come."""
        rows = await session.execute(sql.LANE_POSITIONS, {"lanes": list(lanes)})
        return {row.id: LanePosition(row.next_seq_id, row.done) for row in rows}

    async def leases(self, session: AsyncSession, runs: Sequence[RunId]) -> dict[RunId, RunLease]:
        """Return the valid lease of each of the runs that has one."""
        found = await session.execute(sql.LEASES, {"lanes": few_lengths(runs)}) if runs else ()
        return {RunId(row.id): RunLease(row.trainer_id, row.lease_token) for row in found}

    async def ended(self, session: AsyncSession, ids: Sequence[str]) -> set[str]:
        """Return those of the operations that are final."""
        found: set[str] = set()
        for begin in range(0, len(ids), sql.MAX_READY):
            some = few_lengths(ids[begin : begin + sql.MAX_READY])
            found |= set((await session.execute(sql.ENDED, {"ids": some})).scalars())
        return found

    async def claimed(self, transaction: AsyncSession, ids: Sequence[str], *, process: str) -> dict[str, int]:
        """Return the claim numbers of those of the samples that are pending and claimed by ``process``.

        Lock these samples and the unclaimed ones: ``process`` claims none of them before the transaction's end.
        """
        query = select(Operation.id, Operation.taken_by, Operation.claims).where(
            Operation.id.in_(ids), or_(Operation.taken_by == process, Operation.taken_by.is_(None))
        )
        pending = query.where(Operation.state == OperationState.PENDING).order_by(Operation.id)
        rows = await transaction.execute(pending.with_for_update())
        return {row.id: row.claims for row in rows if row.taken_by == process}

    async def operations_to_replay(
        self, session: AsyncSession, run: RunId, trainer: str, *, after_seq_id: int, before_seq_id: int
    ) -> list[PendingOperation]:
        """Return the done operations of ``run`` that a replay between both seq_ids (exclusive) applies, by seq_id.

        Operations that have changed no adapter are left out. At most ``MAX_PENDING`` are returned, without payloads.
        """
        keys = {"lane": run, "after_seq_id": after_seq_id, "before_seq_id": before_seq_id}
        rows = (await session.execute(sql.TO_REPLAY, keys)).all()
        return [pending_operation(row, trainer, is_replay=True) for row in rows]

    async def complete(
        self,
        transaction: AsyncSession,
        completions: Sequence[Completion],
        *,
        anew: bool = False,
        process: str | None = None,
    ) -> set[str]:
        """Write results or errors and advance their runs, with one statement of each kind for all completions.

        Ignores completions of operations that are final already, except that a cancelled sample's tokens are counted.
        With ``process``, leaves out pending samples that this process has not claimed any more, and returns their ids.
        Raises ``LeaseLost`` when another trainer leases a run.
        Raises ``OutcomeConflict`` when a training operation has ended as failed and is completed with a result, or the other
        way round: its adapter in memory is not what a replay would make. With ``anew`` it is raised for every training
        operation that is final already, since its side effects are in the database too.
        """
        steps = await lock_leased_runs(transaction, completions)
        ids = {"ids": [one.operation.id for one in completions]}
        charged = {row.id: row for row in await transaction.execute(sql.STILL_PENDING, ids)}
        lost = set() if process is None else {row.id for row in charged.values() if row.taken_by != process}
        completions = [one for one in completions if one.operation.id not in lost]
        pending = charged.keys() - lost
        await check_final(transaction, [one for one in completions if one.operation.id not in pending], anew=anew)
        now = self._clock()
        rows = rows_of_outcomes(completions, pending, steps, now)
        for one in rows.ended:
            self.wakeups.announce_after_commit(transaction, operation_topic(one.operation.id))
            after_commit(transaction, partial(self._telemetry.finished, one.operation, one.outcome))
        for lane in rows.sampled_lanes:
            self.wakeups.announce_after_commit(transaction, ended_samples_topic(lane))
        # Their first COMMIT may have lost its answer, and whoever sent it has told nobody.
        for one in completions:
            if one.operation.id not in pending:
                self._tell_end(transaction, one.operation)
        await rows.write(transaction)
        used = {one.operation.id: tokens_used(one) for one in completions}
        await settle(transaction, [(row, used[row.id]) for row in charged.values() if row.id not in lost], now)
        if rows.cut:
            await count_cut(transaction, rows.cut, now)
        await rows.points.write(transaction, self.wakeups)
        await advance(transaction, steps.keys(), now, rows.points.steps_taken)
        return lost

    def _tell_end(self, transaction: AsyncSession, operation: ReadyOperation) -> None:
        self.wakeups.announce_after_commit(transaction, operation_topic(operation.id))
        if operation.kind is OperationKind.SAMPLE:
            self.wakeups.announce_after_commit(transaction, ended_samples_topic(operation.lane))

    async def cancel(
        self, transaction: AsyncSession, selection: Selection, error: WeftError, *, only_samples: bool = False
    ) -> list[EndedOperation]:
        """Fail the pending operations of ``selection`` with ``error``, and return them (``ledger.cancellation``).

        After the commit, clients that wait are answered, samplers abort, and trainers forget what they had begun.
        """
        now = self._clock()
        ended = await end_samples(transaction, selection, error, now)
        if not only_samples:
            ended += await end_training(transaction, selection, error, now)
        topics = {operation_topic(one.id) for one in ended}
        topics |= {cancelled_samples_topic(one.base_model) for one in ended if one.kind is OperationKind.SAMPLE}
        topics |= {ended_samples_topic(one.lane) for one in ended if one.kind is OperationKind.SAMPLE}
        topics |= {recalls_topic(one.trainer) for one in ended if one.trainer is not None}
        for topic in sorted(topics):
            self.wakeups.announce_after_commit(transaction, topic)
        for one in ended:
            finished = partial(self._telemetry.metrics.operation_finished, one.kind.value, error.code)
            after_commit(transaction, finished)
        return ended

    async def has_next(self, transaction: AsyncSession, run: RunId) -> bool:
        """Lock the run, and return whether the operation that may run next in it is there and pending."""
        await lock_runs(transaction, [run])
        return await transaction.scalar(sql.PENDING_NEXT, {"lane": run}) is not None

    async def fail_pending(
        self, transaction: AsyncSession, run: RunId, error: RunUnloaded | SessionEnded, *, unloads: bool = False
    ) -> None:
        """Fail every pending operation of ``run``, whose adapter is gone; unloads only with ``unloads``."""
        next_seq_id = select(Run.next_seq_id).where(Run.id == run).scalar_subquery()
        which = () if unloads else (Operation.kind != OperationKind.UNLOAD_MODEL,)
        failed = await transaction.execute(
            update(Operation)
            # All before ``next_seq_id`` is final: naming it spares a read of the whole lane.
            .where(Operation.lane == run, Operation.seq_id >= next_seq_id)
            .where(Operation.state == OperationState.PENDING, *which)
            .values(state=OperationState.FAILED, finished_at=self._clock(), **error_columns(error))
            .returning(*sql.CHARGED_COLUMNS)
        )
        rows = failed.all()
        ids = [row.id for row in rows]
        if ids:
            await transaction.execute(sql.DROP_PAYLOADS, {"ids": ids})
            await settle_cancelled(transaction, rows)
        for request_id in ids:
            self.wakeups.announce_after_commit(transaction, operation_topic(request_id))

    # --- answering -------------------------------------------------------------------------------------------------

    async def status(self, tenant: TenantId, request_id: str) -> OperationStatus:
        """Return the status of the tenant's operation; concurrent calls share one query. Raises ``NotFound``."""
        return await self._statuses.ask((tenant, request_id))

    async def _read_statuses(self, asked: Sequence[tuple[TenantId, str]]) -> list[OperationStatus | WeftError]:
        async with self._database.read() as session:
            rows = await session.execute(sql.STATUSES, {"ids": few_lengths([request_id for _, request_id in asked])})
            found = {(row.tenant_id, row.id): status_of(row) for row in rows}
        foreign = {request_id for _, request_id in found}
        return [
            found.get(key) or NotFound(f"no request {key[1][:100]!r}", is_foreign=key[1] in foreign) for key in asked
        ]

    async def wait_until_final(self, tenant: TenantId, request_id: str, *, seconds: float) -> OperationStatus:
        """Return the status once the operation is final, or after ``seconds``. Raises ``NotFound``."""
        with self.wakeups.listen(operation_topic(request_id)) as event:
            ends = monotonic() + seconds
            status = await self.status(tenant, request_id)
            while status.state is OperationState.PENDING and not self.wakeups.is_closed:
                if not await wait_for(event, ends - monotonic()):
                    break
                status = await self.status(tenant, request_id)
        return status

    async def result(self, tenant: TenantId, status: OperationStatus) -> Result | None:
        """Return the decoded result of a done operation, or None once it is pruned. A large result takes another query.

        Raises ``UnreadableOperation``.
        """
        body = status.body if status.tenant == tenant else None
        if body is None:
            async with self._database.read() as session:
                keys = {"operation_id": status.id, "tenant": tenant}
                body = (await session.execute(sql.RESULT, keys)).scalar_one_or_none()
        if body is None:
            return None
        try:
            return decode_result(status.kind, body)
        except ValueError as error:
            log.error("result of operation=%s kind=%s cannot be read: %s", status.id, status.kind, error)
            raise UnreadableOperation(
                f"the result of request {status.id} was recorded and cannot be read back; the service's log has the cause"
            ) from error
