"""Conversion between the ledger's database rows and its typed records."""

import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from math import inf
from time import monotonic
from typing import Any

from sqlalchemy import Row, Select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.codec import decode_payload
from contracts.errors import Unavailable, WeftError
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
from contracts.operations import OperationKind, Payload, Unreadable, known_kind
from ledger.payload_files import PayloadFiles
from tenants.prices import PricedQuantity
from tenants.rate_holds import is_budgeted
from tenants.rates import seconds_to_wait
from tenants.runs import lora_settings
from tenants.usage_costs import of_sample

log = logging.getLogger(__name__)

_INLINE_BYTES = 64 * 1024
"""Most bytes of payloads that are decoded on the event loop."""
_WIDENED = 2
"""Most times that an encoded payload grows when it is decoded: integers take 4 bytes, and then 8."""
_TOKEN_BYTES = 24
"""Bytes of a decoded token with its target and two numbers for its loss. Rows of older versions have the packed size alone."""


def new_row(new: NewOperation | RejectedOperation, now: datetime, state: OperationState) -> dict[str, object]:
    """Return the columns of a new operation."""
    values: dict[str, object] = {
        "id": new.id,
        "tenant_id": new.tenant,
        "lane": new.lane,
        "seq_id": new.seq_id,
        "kind": new.kind,
        "base_model": new.base_model,
        "state": state,
        "body_digest": new.digest,
        "trace_id": new.trace_id,
        "created_at": now,
        "key_id": new.key_id,
    }
    if isinstance(new, RejectedOperation):
        return values | {"finished_at": now, **error_columns(new.error)}
    reserved = 0 if new.demand is None else new.demand.tokens
    counted = {"tokens": new.tokens, "payload_bytes": new.payload.counted_bytes, "reserved_tokens": reserved}
    return values | counted


def payload_row(new: NewOperation) -> dict[str, object]:
    """Return the columns of a new operation's payload."""
    return {
        "operation_id": new.id,
        "tenant_id": new.tenant,
        "body": new.payload.body,
        "file_digest": new.payload.file_digest,
    }


async def ready_operations(
    session: AsyncSession, query: Select[Any], keys: dict[str, object], files: PayloadFiles, *, skips: bool = False
) -> list[ReadyOperation]:
    """Run ``query`` and return its rows with their payloads decoded, off the event loop when they are large.

    With ``skips`` an operation whose file cannot be read now is left out. Raises ``Unavailable`` otherwise.
    """
    rows = (await session.execute(query, keys)).all()
    if sum(len(row.body or b"") for row in rows) > _INLINE_BYTES or any(row.file_digest is not None for row in rows):
        return await files.off_loop(lambda: list(_readable(rows, files, skips=skips)))
    return list(_readable(rows, files, skips=skips))


def _readable(rows: Sequence[Row[Any]], files: PayloadFiles, *, skips: bool) -> Iterator[ReadyOperation]:
    for row in rows:
        try:
            yield _ready(row, files)
        except Unavailable as outage:
            if not skips:
                raise
            log.warning("operation=%s waits: %s", row.id, outage.message)


def status_of(row: Row[Any]) -> OperationStatus:
    """Return a row of ``STATUSES`` as a record."""
    return OperationStatus(
        id=RequestId(row.id),
        tenant=TenantId(row.tenant_id),
        kind=known_kind(row.kind),
        lane=row.lane,
        state=OperationState(row.state),
        result_bytes=row.result_bytes,
        pruned=row.pruned_at is not None,
        error_code=row.error_code,
        error_category=row.error_category or "unknown",
        error_message=row.error_message,
        body=row.body,
    )


def pending_operation(
    row: Row[Any], trainer: str, *, is_replay: bool = False, starts_at: float = 0.0
) -> PendingOperation:
    """Return a row of ``PENDING_TRAINING`` or ``TO_REPLAY`` as a record; ``trainer`` leases its run."""
    return PendingOperation(
        id=RequestId(row.id),
        position=row.position,
        tenant=TenantId(row.tenant_id),
        run=RunId(row.lane),
        seq_id=row.seq_id,
        kind=known_kind(row.kind),
        tokens=row.tokens,
        next_seq_id=row.next_seq_id,
        share=row.share,
        lease=RunLease(trainer, row.lease_token),
        lora=lora_settings(row),
        trace_id=row.trace_id,
        is_replay=is_replay,
        starts_at=starts_at,
        weight=row.run_weight,
        nbytes=max(_WIDENED * row.payload_bytes, _TOKEN_BYTES * row.tokens),
    )


def _ready(row: Row[Any], files: PayloadFiles) -> ReadyOperation:
    kind = known_kind(row.kind)
    return ReadyOperation(
        id=RequestId(row.id),
        position=row.position,
        tenant=TenantId(row.tenant_id),
        lane=row.lane,
        seq_id=row.seq_id,
        kind=kind,
        payload=_payload(row, kind, files),
        tokens=row.tokens,
        trace_id=row.trace_id,
        accepted_at=row.created_at,
        share=row.share,
        attempts=row.attempts,
        claim=row.claims,
        has_progress=bool(row.has_progress),
    )


def _payload(row: Row[Any], kind: OperationKind, files: PayloadFiles) -> Payload | Unreadable:
    """Return the row's payload. One that cannot be read fails its own operation, not the query that found it."""
    try:
        if row.body is None:
            raise ValueError("its payload is gone")
        return decode_payload(kind, row.body if row.file_digest is None else files.read(row.id, row.file_digest))
    except ValueError as error:
        reason = str(error)
    log.error("operation=%s kind=%s cannot be read: %s", row.id, row.kind, reason)
    return Unreadable(reason)


def finished_row(completion: Completion, now: datetime, *, result_bytes: int | None) -> dict[str, object]:
    """Return the parameters of ``FINISH``. ``result_bytes`` is the encoded result's size, None for an error."""
    outcome = completion.outcome
    error = outcome if isinstance(outcome, WeftError) else None
    # Tokens of training data and prompts were counted at acceptance.
    drawn, cached = completion.sampled
    return {
        "operation_id": completion.operation.id,
        "now": now,
        "new_state": OperationState.DONE if error is None else OperationState.FAILED,
        "size": result_bytes,
        "made": drawn,
        "cached": cached,
        "code": error and error.code,
        "category": error and error.category,
        "message": error and error.message,
    }


def starts_at(row: Row[Any], now: datetime) -> float:
    """Return the monotonic seconds from which on a row of ``PENDING_TRAINING`` may run, infinity when no time is known."""
    if row.is_over_budget and is_budgeted(row.seq_id, row.tokens):
        return inf
    seconds = max(seconds_to_wait(row, row.tokens, now), (row.lines_until or 0.0) - now.timestamp())
    return monotonic() + seconds if seconds > 0 else 0.0


def tokens_used(completion: Completion) -> dict[PricedQuantity, int]:
    """Return the tokens by meter that the operation's end is metered with: none for a failed one without drawn tokens."""
    tokens, (drawn, cached) = completion.operation.tokens, completion.sampled
    if isinstance(completion.outcome, WeftError) and not drawn:
        return {}
    if completion.operation.kind is not OperationKind.SAMPLE:
        return {PricedQuantity.TRAIN_TOKENS: tokens}
    return of_sample(tokens, cached, drawn)


def error_columns(error: WeftError) -> dict[str, str]:
    """Return the columns that hold a failed operation's error."""
    return {"error_code": error.code, "error_category": error.category, "error_message": error.message}
