"""A ledger's rows as a busy service leaves them: mostly done, the older half pruned, one in a thousand pending."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from uuid import UUID

import numpy as np
from psycopg import Connection, sql

from contracts.codec import encode, pack, request_digest
from contracts.ids import RequestId, RunId, SamplerId, SessionId, TenantId
from contracts.ledger_records import OperationState, RunLease
from contracts.losses import LossName
from contracts.operations import (
    Datum,
    ForwardBackwardOutput,
    LossSpec,
    OperationKind,
    OptimStep,
    OptimStepped,
    Payload,
    Result,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    TrainingBatch,
)
from ledger.statements import operations, payloads, results, runs
from store.tables import RunState
from tenants.runs import run_id_for

LEASE = RunLease("a trainer", 1)
"""Lease of every run."""
BASE_MODEL = "weft/tiny"
GRACE = timedelta(hours=1)
"""Results older than this are pruned."""
_SPAN = timedelta(hours=2)
_POSITIONS = 32
"""Tokens of a datum, a prompt and a sample: about 0.9 kB a payload, 0.2 kB a result."""
_LONGEST_RUN = 5_000
"""Operations of a run before the tenant begins another run."""
_NOT_YET_SNAPSHOTTED = 32
STALE = 500
"""Results that are due for pruning: the same number at every size, so that pruning has the same work."""
_ONE_IN_PENDING, _ONE_IN_FAILED, _ONE_IN_SAMPLES = 1000, 100, 8
_REMEMBERED = 4000
"""Finished operations whose ids are kept, so that calls can ask for them."""

Row = dict[str, object]


def a_batch() -> TrainingBatch:
    """Return a batch of one sequence."""
    tokens = np.arange(_POSITIONS, dtype=np.int64)
    weights = np.ones(_POSITIONS, dtype=np.float32)
    return TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [Datum(tokens, tokens + 1, {"weights": weights})])


def a_pass_result() -> ForwardBackwardOutput:
    """Return the result of ``a_batch``."""
    return ForwardBackwardOutput([np.zeros(_POSITIONS, dtype=np.float32)], {"loss:sum": 1.0})


def _bodies() -> dict[OperationKind, tuple[Payload, Result]]:
    sampled = SampledSequence("length", np.zeros(_POSITIONS, np.int32), np.zeros(_POSITIONS, np.float32))
    return {
        OperationKind.FORWARD_BACKWARD: (a_batch(), a_pass_result()),
        OperationKind.OPTIM_STEP: (OptimStep(), OptimStepped({"lr": 1e-4})),
        OperationKind.SAMPLE: (SampleRequest(np.arange(_POSITIONS, dtype=np.int64)), SampleOutput([sampled])),
    }


@dataclass
class _Lane:
    """A run that the generator adds operations to."""

    run: RunId
    tenant: TenantId
    last_seq_id: int = 0


@dataclass
class LedgerRows:
    """Generates ``rows`` operations of ``tenants`` tenants that end at ``now``; the same ``seed`` gives the same rows.

    ``operations`` must be read to its end before ``runs``, and fills ``finished``.
    """

    rows: int
    tenants: int
    now: datetime
    seed: int = 1
    stale: int = STALE
    pending: int | None = None
    """Operations that are pending. Default: one in a thousand."""
    finished: list[tuple[TenantId, RequestId]] = field(default_factory=list)
    """Finished operations whose results are not pruned, with their tenants. Not all of them are kept."""

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._pending = self.rows // _ONE_IN_PENDING if self.pending is None else self.pending
        self._old: list[_Lane] = []
        self.active = [_Lane(run_id_for(self.session(one), 1), self.tenant(one)) for one in range(self.tenants)]
        """The run that each tenant trains. All of its operations are done."""
        self._waiting = [_Lane(run_id_for(self.session(one), 0), self.tenant(one)) for one in range(self.tenants)]
        self._samples = 0

    def tenant(self, number: int) -> TenantId:
        """Return the id of a tenant."""
        return TenantId(f"{number:032x}")

    def session(self, number: int) -> SessionId:
        """Return the id of a tenant's session."""
        return SessionId(f"{number + 0xABCDEF:032x}")

    def tenant_rows(self) -> Iterator[Row]:
        """Yield rows of ``tenants``."""
        for number in range(self.tenants):
            yield {"id": self.tenant(number), "name": f"tenant{number}", "share": 1.0, "created_at": self.now}

    def session_rows(self) -> Iterator[Row]:
        """Yield rows of ``sessions``."""
        for number in range(self.tenants):
            yield {
                "id": self.session(number),
                "tenant_id": self.tenant(number),
                "tags": "[]",
                "sdk_version": "0.38.0",
                "created_at": self.now,
                "last_seen_at": self.now,
            }

    def run_rows(self) -> Iterator[Row]:
        """Yield rows of ``runs``. Call this after the operations have been read."""
        by_state = {RunState.UNLOADED: self._old, RunState.READY: self.active + self._waiting}
        for state, lanes in by_state.items():
            for lane in lanes:
                session_id, _, number = lane.run.split(":")
                is_waiting = number == "0"
                yield {
                    "id": lane.run,
                    "tenant_id": lane.tenant,
                    "session_id": session_id,
                    "model_seq_id": int(number),
                    "base_model": BASE_MODEL,
                    "rank": 8,
                    "alpha": 32.0,
                    "seed": 1,
                    "train_attn": True,
                    "train_mlp": True,
                    "train_unembed": True,
                    "state": state,
                    "next_seq_id": 1 if is_waiting else lane.last_seq_id + 1,
                    "snapshot_seq_id": 0 if is_waiting else max(0, lane.last_seq_id - _NOT_YET_SNAPSHOTTED),
                    "trainer_id": LEASE.trainer,
                    "lease_token": LEASE.token,
                    "created_at": self.now,
                    "last_request_at": self.now,
                }

    def operation_rows(self) -> Iterator[tuple[Row, Row | None, Row | None]]:
        """Yield each operation with its payload and its result, in order. A part that is pruned or not there yet is None."""
        bodies = {
            kind: (pack(asked), encode(result), request_digest(kind, pack(asked)))
            for kind, (asked, result) in _bodies().items()
        }
        for number in range(self.rows):
            operation = self._operation(number)
            asked, result, body_digest = bodies[OperationKind(str(operation["kind"]))]
            operation["body_digest"] = body_digest
            keys = {"operation_id": operation["id"], "tenant_id": operation["tenant_id"]}
            is_pruned, is_done = operation["pruned_at"] is not None, operation["state"] == OperationState.DONE
            if is_done:
                operation["result_bytes"] = len(result)
            yield (
                operation,
                None if is_pruned else {**keys, "body": asked},
                {**keys, "body": result} if is_done and not is_pruned else None,
            )

    def _operation(self, number: int) -> Row:
        """Return the columns that operations of every kind have, by age: pruned, stale, finished, pending."""
        request = RequestId(str(UUID(int=self._random.getrandbits(128), version=4)))
        created = self.now - _SPAN * ((self.rows - number) / self.rows)
        is_pending = number >= self.rows - self._pending
        is_failed = not is_pending and self._random.randrange(_ONE_IN_FAILED) == 0
        is_pruned = number < self.rows // 2 - self.stale
        state = OperationState.PENDING if is_pending else OperationState.FAILED if is_failed else OperationState.DONE
        row: Row = {
            "id": request,
            "base_model": BASE_MODEL,
            "state": state,
            "tokens": _POSITIONS,
            "created_at": created,
            "finished_at": None if is_pending else created,
            "error_code": "invalid_request" if is_failed else None,
            "error_category": "user" if is_failed else None,
            "error_message": "data must not be empty" if is_failed else None,
            "result_bytes": None,
            "pruned_at": created + GRACE if is_pruned else None,
            **self._place(is_pending=is_pending),
        }
        if state is OperationState.DONE and not is_pruned and number % max(1, self.rows // 2 // _REMEMBERED) == 0:
            self.finished.append((TenantId(str(row["tenant_id"])), request))
        return row

    def _place(self, *, is_pending: bool) -> Row:
        """Return tenant, lane, seq_id and kind of the next operation. Pending operations are in lanes of their own."""
        number = self._random.randrange(self.tenants)
        if self._random.randrange(_ONE_IN_SAMPLES) == 0:
            self._samples += 1
            lane = SamplerId(f"{self.session(number)}:sample:0")
            kind = OperationKind.SAMPLE
            return {"tenant_id": self.tenant(number), "lane": lane, "seq_id": self._samples, "kind": kind}
        run = (self._waiting if is_pending else self.active)[number]
        if run.last_seq_id == _LONGEST_RUN:
            self._old.append(run)
            session_id, _, model_seq_id = run.run.split(":")
            run = self.active[number] = _Lane(run_id_for(session_id, int(model_seq_id) + 1), run.tenant)
        run.last_seq_id += 1
        kind = OperationKind.OPTIM_STEP if run.last_seq_id % 2 == 0 else OperationKind.FORWARD_BACKWARD
        return {"tenant_id": run.tenant, "lane": run.run, "seq_id": run.last_seq_id, "kind": kind}


def copy_into(connection: Connection, made: LedgerRows) -> None:
    """Fill a database that has the newest schema, vacuum and analyse it. ``connection`` commits by itself."""
    _copy(connection, "tenants", made.tenant_rows())
    _copy(connection, "sessions", made.session_rows())
    asked: list[Row] = []
    answered: list[Row] = []
    operation_rows: list[Row] = []

    def flush() -> None:
        for table, rows in ((operations, operation_rows), (payloads, asked), (results, answered)):
            _copy(connection, table.name, iter(rows))
            rows.clear()

    for operation, payload, result in made.operation_rows():
        operation_rows.append(operation)
        asked += [] if payload is None else [payload]
        answered += [] if result is None else [result]
        if len(operation_rows) == 20_000:
            flush()
    flush()
    _copy(connection, runs.name, made.run_rows())
    connection.execute("VACUUM ANALYZE")


def tables_of(made: LedgerRows) -> Iterator[tuple[str, list[Row]]]:
    """Return the rows by the table's name, in memory. Only for small numbers of rows."""
    yield "tenants", list(made.tenant_rows())
    yield "sessions", list(made.session_rows())
    everything = list(made.operation_rows())
    yield "runs", list(made.run_rows())
    yield "operations", [operation for operation, _, _ in everything]
    yield "operation_payloads", [row for _, row, _ in everything if row is not None]
    yield "operation_results", [row for _, _, row in everything if row is not None]


def _copy(connection: Connection, table: str, rows: Iterator[Row]) -> None:
    first = next(rows, None)
    if first is None:
        return
    columns = sql.SQL(", ").join(map(sql.Identifier, first))
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(table), columns)
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.write_row(list(first.values()))
        for row in rows:
            copy.write_row(list(row.values()))
