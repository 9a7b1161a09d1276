"""From a checked request to a ledger row: the one way every training request takes."""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import orjson
from fastapi import Response

from api.services import ApiServices
from contracts.base_model import BaseModelFacts
from contracts.codec import digest
from contracts.errors import InvalidRequest, RunUnloaded, SessionEnded, WeftError
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import NewOperation, RejectedOperation
from contracts.operations import OperationKind, Payload, SaveWeightsForSampler, TrainingBatch
from telemetry.context import current_work
from tenants.runs import run_standing

OFF_LOOP_BYTES = 256 * 1024
"""A body above this size is decoded on a thread: polls and heartbeats must not wait for it."""

Build = Callable[[BaseModelFacts], Payload]
"""Makes a payload of an already read body, for the run's base model. Raises ``WeftError``."""


@dataclass(frozen=True, slots=True)
class TrainingSubmission:
    """A training request whose key is known. ``body`` is what its digest falls back to when it cannot be built."""

    model_id: str
    seq_id: int
    kind: OperationKind
    body: bytes
    build: Build


async def submit_training(services: ApiServices, caller: TenantId, submission: TrainingSubmission) -> Response:
    """Record the request and promise its result.

    A request that can never run is recorded as failed, because its seq_id is used up. Raises ``NotFound`` for a foreign
    run, ``RunUnloaded``, ``SessionEnded``, ``SequenceConflict``.
    """
    async with services.database.read() as session:
        run = await run_standing(session, caller, submission.model_id)
    facts = services.base(run.base_model)
    payload: Payload | None = None
    error: WeftError | None = None
    try:
        if len(submission.body) > OFF_LOOP_BYTES:
            payload = await asyncio.to_thread(submission.build, facts)
        else:
            payload = submission.build(facts)
        identity = _identity(submission.kind, payload)
    except WeftError as refusal:
        error = refusal
        identity = hashlib.blake2b(submission.body, digest_size=16).digest()
    try:
        run.check_open()
    except (RunUnloaded, SessionEnded):
        async with services.database.read() as session:
            earlier = await services.ledger.find(session, lane=run.id, seq_id=submission.seq_id, digest=identity)
        if earlier is None:
            raise
        return promise(earlier, model_id=run.id)
    async with services.database.write() as transaction:
        if payload is None:
            rejected = RejectedOperation(
                tenant=caller,
                lane=run.id,
                seq_id=submission.seq_id,
                kind=submission.kind,
                base_model=run.base_model,
                digest=identity,
                error=error or InvalidRequest("the request cannot run"),
                trainer=run.trainer,
                trace_id=current_work().trace_id,
            )
            request_id = await services.ledger.reject(transaction, rejected)
        else:
            new = NewOperation(
                tenant=caller,
                lane=run.id,
                seq_id=submission.seq_id,
                kind=submission.kind,
                base_model=run.base_model,
                payload=payload,
                digest=identity,
                tokens=_tokens(payload),
                trainer=run.trainer,
                trace_id=current_work().trace_id,
            )
            request_id = await services.ledger.accept(transaction, new)
    return promise(request_id, model_id=run.id)


def promise(
    request_id: RequestId, *, model_id: str | None = None, sample_sequence_ids: list[str] | None = None
) -> Response:
    """The answer to every submission."""
    content: dict[str, object] = {"request_id": request_id}
    if model_id is not None:
        content["model_id"] = model_id
    if sample_sequence_ids is not None:
        content["sample_sequence_ids"] = sample_sequence_ids
    return Response(orjson.dumps(content), media_type="application/json")


def _identity(kind: OperationKind, payload: Payload) -> bytes:
    """What tells a repeat from a conflict: 16 bytes of the payload and, as forward and forward_backward share one, the kind.

    The SDK repeats a nameless save under the same seq_id with a new sampler counter: that is the same request.
    """
    if isinstance(payload, SaveWeightsForSampler):
        payload = replace(payload, sampling_session_seq_id=None)
    return hashlib.blake2b(digest(payload), key=kind.encode(), digest_size=16).digest()


def _tokens(payload: Payload) -> int:
    return sum(len(datum.tokens) for datum in payload.data) if isinstance(payload, TrainingBatch) else 0
