"""The ledger of operations: the row is the truth.

Invariants: ``(lane, seq_id)`` is unique, so a repeated request finds its row; a run's operations run strictly by seq_id
(``runs.next_seq_id`` names the only one that may); a result and the run's advance are written in one transaction;
wake-ups are announced after the commit and carry nothing.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from functools import partial
from time import monotonic, time
from typing import Any
from uuid import uuid4

from sqlalchemy import Row, Select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.codec import decode_payload, decode_result, encode
from contracts.errors import LeaseLost, NotFound, RunUnloaded, SequenceConflict, WeftError
from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import (
    Completion,
    NewOperation,
    OperationState,
    OperationStatus,
    PendingOperation,
    ReadyOperation,
    RejectedOperation,
    RunLease,
)
from contracts.operations import OperationKind, Result, SampleOutput
from ledger import statements as sql
from ledger.wakeups import (
    Wakeups,
    departures_topic,
    gates_topic,
    operation_topic,
    placements_topic,
    sampling_topic,
    trainer_topic,
    versions_topic,
)
from store.batcher import Batcher, few_lengths
from store.clock import Clock
from store.database import Database, after_commit
from store.repeat import wait_for
from store.tables import Operation
from telemetry.telemetry import Telemetry
from tenants.sample_reports import prune_reports
from tenants.usage import roll_up


class Ledger:
    """Reads and writes operations; transactions belong to the caller except where a method says otherwise."""

    def __init__(self, database: Database, wakeups: Wakeups, clock: Clock, telemetry: Telemetry) -> None:
        self._database = database
        self._telemetry = telemetry
        self.wakeups = wakeups
        self._clock = clock
        self._statuses: Batcher[tuple[TenantId, str], OperationStatus] = Batcher(self._read_statuses)

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
        started = time()
        request_id = await self._insert(transaction, new, state=OperationState.PENDING)
        if new.kind is OperationKind.SAMPLE:
            after_commit(transaction, lambda: self.wakeups.announce(sampling_topic(new.base_model)))
        else:
            await self._announce_training(transaction, new)
        if self._telemetry.traces.is_on:
            after_commit(transaction, partial(self._telemetry.accepted, request_id, new.kind, started=started))
        return request_id

    async def _announce_training(self, transaction: AsyncSession, new: NewOperation | RejectedOperation) -> None:
        """Tell the run's trainer, or have one found: that is announced until it is done."""
        if new.trainer is not None:
            topic = trainer_topic(new.trainer)
        else:
            topic = placements_topic(new.base_model)
            values = {"run_id": new.lane, "tenant_id": new.tenant, "base_model": new.base_model}
            placement = sql.PLACE_UNLESS_PRESENT[transaction.get_bind().dialect.name]
            await transaction.execute(placement, {**values, "created_at": self._clock()})
        after_commit(transaction, partial(self.wakeups.announce, topic))

    async def reject(self, transaction: AsyncSession, rejected: RejectedOperation) -> RequestId:
        """Record a failed operation of training, so that later seq_ids of its run can run. Raises ``SequenceConflict``."""
        await self._lock_runs(transaction, [rejected.lane])
        request_id = await self._insert(transaction, rejected, state=OperationState.FAILED)
        await self._advance(transaction, [rejected.lane])
        await self._announce_training(transaction, rejected)
        return request_id

    async def _insert(
        self, transaction: AsyncSession, new: NewOperation | RejectedOperation, *, state: OperationState
    ) -> RequestId:
        values = operation_values(new, self._clock(), state)
        request_id = RequestId(str(values["id"]))
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
        self, session: AsyncSession, base_model: str, *, trainer: str, after_position: int
    ) -> list[PendingOperation]:
        """Pending operations of the runs that ``trainer`` has, accepted after ``after_position``, oldest first.

        Whether one may run is told by ``next_seq_id`` of its run. Without payloads; at most ``MAX_PENDING`` a call.
        """
        keys = {"base_model": base_model, "after_position": after_position, "trainer": trainer}
        return [_pending(row, trainer) for row in (await session.execute(sql.PENDING_TRAINING, keys)).all()]

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

    async def take_samples(
        self, transaction: AsyncSession, base_model: str, *, process: str, most: int
    ) -> list[ReadyOperation]:
        """Samples that no process works on, oldest first, which ``process`` does from now on; at most ``most``."""
        keys = {"base": base_model, "process": process, "most": min(most, sql.MAX_READY)}
        taken = list((await transaction.execute(sql.TAKE_SAMPLES, keys)).scalars())
        return await _ready_rows(transaction, sql.BY_ID, {"ids": taken}) if taken else []

    async def give_back_samples(
        self, transaction: AsyncSession, base_model: str, *, process: str, but: Collection[str]
    ) -> None:
        """Samples that ``process`` has taken, ``but`` those that it works on, are anybody's again."""
        await transaction.execute(
            sql.GIVE_BACK_SAMPLES, {"base": base_model, "process": process, "but": list(but) or [""]}
        )

    async def operations_to_replay(
        self, session: AsyncSession, run: RunId, *, after_seq_id: int, before_seq_id: int
    ) -> list[ReadyOperation]:
        """Operations of ``run`` that were done in ``(after_seq_id, before_seq_id)``, by seq_id."""
        keys = {"lane": run, "after_seq_id": after_seq_id, "before_seq_id": before_seq_id}
        return await _ready_rows(session, sql.TO_REPLAY, keys)

    async def complete(self, transaction: AsyncSession, completions: Sequence[Completion]) -> None:
        """Write results or errors and advance their runs, in one statement of each kind however many there are.

        A completion whose operation is final already is ignored. Raises ``LeaseLost`` when a run is another trainer's.
        """
        leases = {
            one.operation.lane: one.operation.lease
            for one in completions
            if one.operation.kind is not OperationKind.SAMPLE
        }
        lanes = leases.keys()
        if leases:
            for row in await transaction.execute(sql.LOCK_RUNS, {"lanes": sorted(leases)}):
                if leases[row.id] != RunLease(row.trainer_id, row.lease_token):
                    raise LeaseLost(f"model {row.id} is trained elsewhere by now")
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
            values: dict[str, object] = {"operation_id": operation.id, "now": now, "size": None, "made": 0}
            values |= {"new_state": OperationState.DONE, "code": None, "category": None, "message": None}
            if isinstance(outcome, WeftError):
                values |= {"new_state": OperationState.FAILED, "code": outcome.code}
                values |= {"category": outcome.category, "message": outcome.message}
            else:
                body = encode(outcome)
                values["size"], values["made"] = len(body), _tokens_made(outcome)
                results.append({"operation_id": operation.id, "tenant_id": operation.tenant, "body": body})
            finished.append(values)
            after_commit(transaction, partial(self.wakeups.announce, operation_topic(operation.id)))
            after_commit(transaction, partial(self._telemetry.finished, operation, outcome))
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
        rows = await transaction.execute(sql.PAST_FINAL, {"lanes": sorted(runs)})
        moved = [{"lane": row.lane, "next": row.next, "now": self._clock()} for row in rows]
        if moved:
            await transaction.execute(sql.ADVANCE, moved)

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
        """Where the tenant's operation stands; own read, shared with all who ask in one moment. Raises ``NotFound``."""
        return await self._statuses.ask((tenant, request_id))

    async def _read_statuses(self, asked: Sequence[tuple[TenantId, str]]) -> list[OperationStatus | WeftError]:
        async with self._database.read() as session:
            rows = await session.execute(sql.STATUSES, {"ids": few_lengths([request_id for _, request_id in asked])})
            found = {(row.tenant_id, row.id): _status(row) for row in rows}
        return [found.get(key) or NotFound(f"no request {key[1][:100]!r}") for key in asked]

    async def wait_until_final(self, tenant: TenantId, request_id: str, *, seconds: float) -> OperationStatus:
        """``status``, held until the operation is final or ``seconds`` have passed. Raises ``NotFound``."""
        with self.wakeups.listen(operation_topic(request_id)) as event:
            ends = monotonic() + seconds
            status = await self.status(tenant, request_id)
            while status.state is OperationState.PENDING and not self.wakeups.is_closed:
                if not await wait_for(event, ends - monotonic()):
                    break
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

        What their tenants used is added up first.
        The hot row stays: it still answers a repeated request, and a failure keeps its reason.
        """
        stale = list((await transaction.scalars(sql.STALE, {"finished_before": finished_before})).all())
        if stale:
            ids = {"ids": stale}
            await roll_up(transaction, stale)
            await transaction.execute(sql.DROP_RESULTS, ids)
            await prune_reports(transaction, stale)
            await transaction.execute(sql.MARK_PRUNED, {**ids, "now": self._clock()})
            await transaction.execute(sql.DROP_PAYLOADS, ids)
            await transaction.execute(sql.KEEP_PAYLOADS, ids)
        await transaction.execute(sql.DROP_KEPT_PAYLOADS)
        return len(stale)


def operation_values(new: NewOperation | RejectedOperation, now: datetime, state: OperationState) -> dict[str, object]:
    """The row of an operation, with a fresh id."""
    values: dict[str, object] = {
        "id": str(uuid4()),
        "tenant_id": new.tenant,
        "lane": new.lane,
        "seq_id": new.seq_id,
        "kind": new.kind,
        "base_model": new.base_model,
        "state": state,
        "body_digest": new.digest,
        "trace_id": new.trace_id,
        "created_at": now,
    }
    if isinstance(new, RejectedOperation):
        return values | {"finished_at": now, **_error_columns(new.error)}
    return values | {"tokens": new.tokens}


async def _ready_rows(session: AsyncSession, query: Select[Any], keys: dict[str, object]) -> list[ReadyOperation]:
    return [_ready(row) for row in (await session.execute(query, keys)).all()]


def _status(row: Any) -> OperationStatus:
    return OperationStatus(
        id=RequestId(row.id),
        tenant=TenantId(row.tenant_id),
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


def _pending(row: Row[Any], trainer: str) -> PendingOperation:
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
        lease=RunLease(trainer, row.lease_token),
        trace_id=row.trace_id,
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
        trace_id=row.trace_id,
        accepted_at=row.created_at,
        share=row.share,
    )


def _tokens_made(outcome: Result) -> int:
    """Of a sample; what is trained on was counted when it was accepted."""
    return sum(len(one.tokens) for one in outcome.sequences) if isinstance(outcome, SampleOutput) else 0


def _error_columns(error: WeftError) -> dict[str, str]:
    return {"error_code": error.code, "error_category": error.category, "error_message": error.message}
