"""The ledger of operations: the row is the truth.

Invariants: ``(lane, seq_id)`` is unique, so a repeated request finds its row; a run's operations run strictly by seq_id
(``runs.next_seq_id`` names the only one that may); a result and the run's advance are written in one transaction;
wake-ups are announced after the commit and carry nothing.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import uuid4

from sqlalchemy import Row, Select, delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from engine.contracts.codec import decode_payload, decode_result, encode
from engine.contracts.errors import NotFound, RunUnloaded, SequenceConflict, WeftError
from engine.contracts.ids import RequestId, RunId, TenantId
from engine.contracts.operations import OperationKind, Result
from tenants.clock import Clock
from tenants.database import Database, after_commit
from tenants.models import Operation, OperationPayload, OperationResult, OperationState, Run, RunState
from tenants.sample_reports import prune_reports
from workers.ledger import statements as sql
from workers.ledger.operations import (
    Completion,
    NewOperation,
    OperationStatus,
    PendingOperation,
    ReadyOperation,
    RejectedOperation,
)
from workers.ledger.wakeups import (
    Wakeups,
    departures_topic,
    gates_topic,
    operation_topic,
    sampling_topic,
    training_topic,
    versions_topic,
    wait_for,
)

PRUNE_BATCH = 1000
"""Rows of one sweep, so that it never holds the writer for long."""


class Ledger:
    """Reads and writes operations; transactions belong to the caller except where a method says otherwise."""

    def __init__(self, database: Database, wakeups: Wakeups, clock: Clock) -> None:
        self._database = database
        self.wakeups = wakeups
        self._clock = clock

    # --- accepting -------------------------------------------------------------------------------------------------

    async def find(self, session: AsyncSession, *, lane: str, seq_id: int, digest: bytes) -> RequestId | None:
        """The request id given for this key before, or None. Raises ``SequenceConflict`` if its body was another."""
        row = (await session.execute(sql.FIND, {"lane": lane, "seq_id": seq_id})).one_or_none()
        if row is None:
            return None
        if row.body_digest != digest:
            raise SequenceConflict(f"seq_id {seq_id} was used before with another body; each seq_id names one request")
        return RequestId(row.id)

    async def accept(self, transaction: AsyncSession, new: NewOperation) -> RequestId:
        """Record ``new``, or find its earlier self. Raises ``SequenceConflict``."""
        request_id = await self._insert(transaction, new, state=OperationState.PENDING)
        topic = sampling_topic if new.kind is OperationKind.SAMPLE else training_topic
        after_commit(transaction, lambda: self.wakeups.announce(topic(new.base_model)))
        return request_id

    async def has_room(self, session: AsyncSession, tenant: TenantId, *, most: int) -> bool:
        """Whether the tenant has less than ``most`` samples pending."""
        pending = await session.scalar(sql.SAMPLES_PENDING, {"tenant": tenant, "at_most": most})
        return (pending or 0) < most

    async def reject(self, transaction: AsyncSession, rejected: RejectedOperation) -> RequestId:
        """Record a failed operation, so that later seq_ids of its lane can run. Raises ``SequenceConflict``."""
        if rejected.kind is not OperationKind.SAMPLE:
            await self._lock_runs(transaction, [rejected.lane])
        request_id = await self._insert(transaction, rejected, state=OperationState.FAILED)
        if rejected.kind is not OperationKind.SAMPLE:
            await self._advance(transaction, [rejected.lane])
        after_commit(transaction, lambda: self.wakeups.announce(training_topic(rejected.base_model)))
        return request_id

    async def _insert(
        self, transaction: AsyncSession, new: NewOperation | RejectedOperation, *, state: OperationState
    ) -> RequestId:
        now = self._clock()
        request_id = RequestId(str(uuid4()))
        values: dict[str, object] = {
            "id": request_id,
            "tenant_id": new.tenant,
            "lane": new.lane,
            "seq_id": new.seq_id,
            "kind": new.kind,
            "base_model": new.base_model,
            "state": state,
            "body_digest": new.digest,
            "created_at": now,
        }
        if isinstance(new, RejectedOperation):
            values |= {"finished_at": now, **_error_columns(new.error)}
        else:
            values["tokens"] = new.tokens
        statement = sql.INSERT_UNLESS_PRESENT[transaction.get_bind().dialect.name]
        inserted = (await transaction.execute(statement, values)).scalar_one_or_none()
        if inserted is None:
            found = await self.find(transaction, lane=new.lane, seq_id=new.seq_id, digest=new.digest)
            if found is None:
                raise RuntimeError("an operation's key was taken and is gone; rows are never deleted")
            return found
        if isinstance(new, NewOperation):
            row = {"operation_id": request_id, "tenant_id": new.tenant, "body": encode(new.payload)}
            await transaction.execute(sql.INSERT_PAYLOAD, row)
        return request_id

    # --- running ---------------------------------------------------------------------------------------------------

    async def pending_training(
        self, session: AsyncSession, base_model: str, *, after_position: int
    ) -> list[PendingOperation]:
        """Pending operations of ``base_model``'s runs accepted after ``after_position``, oldest first, without payloads.

        Whether one may run is told by ``next_seq_id`` of its run. At most ``MAX_PENDING`` a call.
        """
        keys = {"base_model": base_model, "after_position": after_position}
        return [_pending(row) for row in (await session.execute(sql.PENDING_TRAINING, keys)).all()]

    async def load(self, session: AsyncSession, ids: Sequence[RequestId]) -> list[ReadyOperation]:
        """The operations with their payloads decoded, oldest first."""
        return await _ready_rows(session, sql.BY_ID, {"ids": list(ids)})

    async def next_seq_ids(self, session: AsyncSession, lanes: Sequence[str]) -> dict[str, int]:
        """The seq_id that may run next in each lane of a run."""
        rows = await session.execute(sql.NEXT_SEQ_IDS, {"lanes": list(lanes)})
        return {row.id: row.next_seq_id for row in rows}

    async def pending_samples(
        self, session: AsyncSession, base_model: str, *, after_position: int
    ) -> list[ReadyOperation]:
        """Pending samples of ``base_model`` accepted after ``after_position``, oldest first; at most ``MAX_READY``."""
        return await _ready_rows(
            session, sql.PENDING_SAMPLES, {"base_model": base_model, "after_position": after_position}
        )

    async def operations_to_replay(
        self, session: AsyncSession, run: RunId, *, after_seq_id: int, before_seq_id: int
    ) -> list[ReadyOperation]:
        """Operations of ``run`` that were done in ``(after_seq_id, before_seq_id)``, by seq_id."""
        keys = {"lane": run, "after_seq_id": after_seq_id, "before_seq_id": before_seq_id}
        return await _ready_rows(session, sql.TO_REPLAY, keys)

    async def complete(self, transaction: AsyncSession, completions: Sequence[Completion]) -> None:
        """Write results or errors and advance their runs, in one statement of each kind however many there are.

        A completion whose operation is final already is ignored.
        """
        lanes = {one.operation.lane for one in completions if one.operation.kind is not OperationKind.SAMPLE}
        await self._lock_runs(transaction, lanes)
        ids = {"ids": [one.operation.id for one in completions]}
        pending = set((await transaction.execute(sql.STILL_PENDING, ids)).scalars())
        now = self._clock()
        finished: list[dict[str, object]] = []
        results: list[dict[str, object]] = []
        for completion in completions:
            operation, outcome = completion.operation, completion.outcome
            if operation.id not in pending:
                continue
            pending.remove(operation.id)
            values: dict[str, object] = {"operation_id": operation.id, "now": now, "size": None}
            values |= {"new_state": OperationState.DONE, "code": None, "category": None, "message": None}
            if isinstance(outcome, WeftError):
                values |= {"new_state": OperationState.FAILED, "code": outcome.code}
                values |= {"category": outcome.category, "message": outcome.message}
            else:
                body = encode(outcome)
                values["size"] = len(body)
                results.append({"operation_id": operation.id, "tenant_id": operation.tenant, "body": body})
            finished.append(values)
            after_commit(transaction, partial(self.wakeups.announce, operation_topic(operation.id)))
        if finished:
            await transaction.execute(sql.FINISH, finished)
        if results:
            await transaction.execute(sql.INSERT_RESULT, results)
        await self._advance(transaction, lanes)

    async def fail_pending(self, transaction: AsyncSession, run: RunId, error: RunUnloaded) -> None:
        """Fail everything still pending in the lane of ``run`` (its adapter is gone), except an unload."""
        failed = await transaction.execute(
            update(Operation)
            .where(
                Operation.lane == run,
                Operation.state == OperationState.PENDING,
                Operation.kind != OperationKind.UNLOAD_MODEL,
            )
            .values(state=OperationState.FAILED, finished_at=self._clock(), **_error_columns(error))
            .returning(Operation.id)
        )
        for request_id in failed.scalars().all():
            after_commit(transaction, partial(self.wakeups.announce, operation_topic(request_id)))

    async def _lock_runs(self, transaction: AsyncSession, runs: Collection[str]) -> None:
        """Two transactions that finish neighbours must not both read the old ``next_seq_id`` (SQLite has one writer)."""
        if runs and transaction.get_bind().dialect.name != "sqlite":
            await transaction.execute(sql.LOCK_RUNS, {"lanes": sorted(runs)})

    async def _advance(self, transaction: AsyncSession, runs: Collection[str]) -> None:
        """Move ``next_seq_id`` of each past every final operation that follows without a gap."""
        if not runs:
            return
        upcoming: dict[str, int] = {}
        moved: dict[str, dict[str, object]] = {}
        for row in await transaction.execute(sql.FINAL_FROM_NEXT, {"lanes": sorted(runs)}):
            if row.seq_id == upcoming.setdefault(row.lane, row.next_seq_id):
                upcoming[row.lane] += 1
                moved[row.lane] = {"lane": row.lane, "next": upcoming[row.lane], "now": self._clock()}
        if moved:
            await transaction.execute(sql.ADVANCE, list(moved.values()))

    def announce_gates(self, transaction: AsyncSession, base_model: str) -> None:
        """Tell those who sample, after the commit, that gates have changed."""
        after_commit(transaction, partial(self.wakeups.announce, gates_topic(base_model)))

    def announce_versions(self, transaction: AsyncSession, base_model: str) -> None:
        """Tell those who sample, after the commit, that live samplers follow other versions."""
        after_commit(transaction, partial(self.wakeups.announce, versions_topic(base_model)))

    def announce_departure(self, transaction: AsyncSession, base_model: str) -> None:
        """Wake those who wait for samples to leave their replicas once ``transaction`` commits."""
        after_commit(transaction, partial(self.wakeups.announce, departures_topic(base_model)))

    # --- answering -------------------------------------------------------------------------------------------------

    async def status(self, tenant: TenantId, request_id: str) -> OperationStatus:
        """Where the tenant's operation stands; own read. Raises ``NotFound``."""
        async with self._database.read() as session:
            keys = {"operation_id": request_id, "tenant": tenant}
            row = (await session.execute(sql.STATUS, keys)).one_or_none()
        if row is None:
            raise NotFound(f"no request {request_id[:100]!r}")
        return OperationStatus(
            id=RequestId(row.id),
            tenant=tenant,
            kind=OperationKind(row.kind),
            lane=row.lane,
            state=OperationState(row.state),
            result_bytes=row.result_bytes,
            pruned=row.pruned_at is not None,
            error_code=row.error_code,
            error_category=row.error_category or "unknown",
            error_message=row.error_message,
            body=row.body,
        )

    async def wait_until_final(self, tenant: TenantId, request_id: str, *, seconds: float) -> OperationStatus:
        """``status``, held until the operation is final or ``seconds`` have passed. Raises ``NotFound``."""
        with self.wakeups.listen(operation_topic(request_id)) as event:
            status = await self.status(tenant, request_id)
            if status.state is OperationState.PENDING and await wait_for(event, seconds):
                status = await self.status(tenant, request_id)
        return status

    async def result(self, tenant: TenantId, status: OperationStatus) -> Result | None:
        """The decoded result of a done operation, None once pruned; own read of a large one."""
        body = status.body if status.tenant == tenant else None
        if body is None:
            async with self._database.read() as session:
                keys = {"operation_id": status.id, "tenant": tenant}
                body = (await session.execute(sql.RESULT, keys)).scalar_one_or_none()
        return None if body is None else decode_result(status.kind, body)

    # --- pruning ---------------------------------------------------------------------------------------------------

    async def prune(self, transaction: AsyncSession, *, finished_before: datetime) -> int:
        """Drop results of operations finished before, and payloads that no replay needs; returns how many results.

        The hot row stays: it still answers a repeated request, and a failure keeps its reason.
        """
        old = select(Operation.id).where(Operation.finished_at < finished_before)
        stale = list((await transaction.scalars(old.where(Operation.pruned_at.is_(None)).limit(PRUNE_BATCH))).all())
        if stale:
            await transaction.execute(delete(OperationResult).where(OperationResult.operation_id.in_(stale)))
            await prune_reports(transaction, stale)
            await transaction.execute(update(Operation).where(Operation.id.in_(stale)).values(pruned_at=self._clock()))
        replayable = (
            select(Operation.id)
            .join(Run, Run.id == Operation.lane)
            .where(Operation.state == OperationState.DONE, Operation.seq_id > Run.snapshot_seq_id)
            .where(Run.state == RunState.READY, Operation.id == OperationPayload.operation_id)
        )
        await transaction.execute(
            delete(OperationPayload).where(
                OperationPayload.operation_id.in_(old.where(Operation.id == OperationPayload.operation_id)),
                ~replayable.exists(),
            )
        )
        return len(stale)


async def _ready_rows(session: AsyncSession, query: Select[Any], keys: dict[str, object]) -> list[ReadyOperation]:
    return [_ready(row) for row in (await session.execute(query, keys)).all()]


def _pending(row: Row[Any]) -> PendingOperation:
    return PendingOperation(
        id=RequestId(row.id),
        position=row.position,
        tenant=TenantId(row.tenant_id),
        run=RunId(row.lane),
        seq_id=row.seq_id,
        kind=OperationKind(row.kind),
        tokens=row.tokens,
        next_seq_id=row.next_seq_id,
        share=row.share,
    )


def _ready(row: Row[Any]) -> ReadyOperation:
    kind = OperationKind(row.kind)
    return ReadyOperation(
        id=RequestId(row.id),
        position=row.position,
        tenant=TenantId(row.tenant_id),
        lane=row.lane,
        seq_id=row.seq_id,
        kind=kind,
        payload=decode_payload(kind, row.body),
        tokens=row.tokens,
    )


def _error_columns(error: WeftError) -> dict[str, str]:
    return {"error_code": error.code, "error_category": error.category, "error_message": error.message}
