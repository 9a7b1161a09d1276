"""Submission of a training request to the ledger. Every training request takes this path."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import orjson
from fastapi import Request, Response

from api.metadata import check_payload_metadata
from api.provenance import with_recorded_logprobs
from api.rate_headers import note_rate, note_stored_rate
from api.request_body import off_loop, request_body
from api.services import ApiServices
from api.shared_reads import Purpose, note_shared_read, shared_read
from api.wire.body import OversizedBody
from api.wire.tinker_requests import key_of_json_beginning, model_key
from contracts.base_model import BaseModelFacts
from contracts.codec import request_digest
from contracts.custom_loss import MAX_GRAPH_BYTES, may_name_loss
from contracts.errors import BudgetSpent, FutureGone, InvalidRequest, RunUnloaded, SessionEnded, WeftError
from contracts.ids import CheckpointId, RequestId
from contracts.ledger_records import NewOperation, RejectedOperation, new_request_id
from contracts.operations import LoadWeights, OperationKind, OptimStep, Payload, TrainingBatch
from contracts.paths import parse_path
from ledger.gaps import closes_gap
from telemetry.context import current_work
from tenants.budgets import refusal
from tenants.limits import Limits
from tenants.project_limits import training_limits
from tenants.rate_lines import lines_of
from tenants.rates import Meter
from tenants.rights import Principal, Scope
from tenants.runs import RunStanding, run_standing

_SAVES = frozenset(
    {OperationKind.SAVE_WEIGHTS, OperationKind.SAVE_WEIGHTS_FOR_SAMPLER, OperationKind.SAVE_WEIGHTS_EXTERNAL}
)
_TAKES_TOKENS = frozenset({OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD})

Build = Callable[[BaseModelFacts], Payload]
"""Builds the payload from the body, for the run's base model. Raises ``WeftError``."""


@dataclass(frozen=True, slots=True)
class TrainingSubmission:
    """A training request whose key is known."""

    model_id: str
    seq_id: int
    kind: OperationKind
    body: bytes
    build: Build | WeftError
    """The error with which the request fails, where it is known already."""
    holder: Principal | None = None
    """Principal of the access token that was sent with it."""


async def submit_json(
    request: Request,
    services: ApiServices,
    caller: Principal,
    kind: OperationKind,
    build: Callable[[bytes, BaseModelFacts], Payload],
    *,
    limit: int | None = None,
) -> Response:
    """Read a JSON body and submit it; ``build`` makes the payload of it. Raises as ``request_body`` and ``submit_training``.

    A body over the limit, which is the route's by default, is recorded as failed, if its beginning has its key.
    """
    try:
        async with request_body(request, services, caller.tenant, limit=limit) as body:
            return await submit_json_body(body, services, caller, kind, build)
    except OversizedBody as error:
        return await submit_oversized(services, caller, kind, error)


async def submit_oversized(
    services: ApiServices, caller: Principal, kind: OperationKind, error: OversizedBody
) -> Response:
    """Record a JSON request over its limit as failed. Raises ``error`` if the body's beginning has no key."""
    beginning = error.beginning
    failed = failed_submission(key_of_json_beginning(beginning), kind, beginning, error)
    return await submit_training(services, caller, failed)


async def submit_json_body(
    body: bytes,
    services: ApiServices,
    caller: Principal,
    kind: OperationKind,
    build: Callable[[bytes, BaseModelFacts], Payload],
    *,
    holder: Principal | None = None,
) -> Response:
    """Submit a body that was read. Raises as ``submit_training``, and ``InvalidRequest`` without a key."""
    key = await off_loop(services, caller.tenant, len(body), model_key, body)
    submission = TrainingSubmission(key.model_id, key.seq_id, kind, body, lambda facts: build(body, facts), holder)
    return await submit_training(services, caller, submission)


def failed_submission(
    key: tuple[str, int] | None, kind: OperationKind, body: bytes, error: WeftError
) -> TrainingSubmission:
    """Return the submission that fails with ``error``. Raises ``error`` without a key to record the failure under."""
    if key is None:
        raise error

    # With its traceback, whose frames hold the submission, neither would be freed until old objects are looked at.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return TrainingSubmission(key[0], key[1], kind, body, error)


async def submit_training(services: ApiServices, caller: Principal, submission: TrainingSubmission) -> Response:
    """Record the request and return the ``promise`` of its result.

    A request that can never run has used up its seq_id, so it is recorded as failed. Raises ``NotFound`` for a run that
    is not the caller's, ``RunUnloaded``, ``SessionEnded``, ``SequenceConflict``, ``FutureGone`` for a repeat of a request that
    is forgotten, and retryable errors such as ``TooManyOperations`` and ``Unavailable``, on which the SDK sends it again.
    """
    async with services.runtime.database.read() as session:
        run = await run_standing(session, caller.reach, submission.model_id, services.runtime.clock())
    ledger = services.runtime.ledger
    try:
        run.check_open()
        await _check_paid(services, caller, run, submission)
        _check_is_new(run, submission)
    except (RunUnloaded, SessionEnded, BudgetSpent, FutureGone):
        digest = await off_loop(services, caller.tenant, len(submission.body), _identity, submission)
        async with services.runtime.database.read() as session:
            earlier = await ledger.find(session, lane=run.id, seq_id=submission.seq_id, digest=digest)
        if earlier is None:
            raise
        return promise(earlier, model_id=run.id)
    operation = await _operation(services, caller, run, submission)
    if isinstance(operation, NewOperation):
        accepting = _accepted(services, caller, run, submission, operation)
        request_id = await ledger.payloads.recorded(operation, accepting)
    else:
        async with services.runtime.database.write() as transaction:
            request_id = await ledger.reject(transaction, operation)
    return promise(request_id, model_id=run.id)


async def _accepted(
    services: ApiServices, caller: Principal, run: RunStanding, submission: TrainingSubmission, operation: NewOperation
) -> RequestId:
    runtime, limits = services.runtime, services.limits.with_own(run.own_limits)
    within = training_limits(limits, run.project_limits)
    accepted = await services.training_intake.accept_rated(operation, within, project=run.bounding_project)
    if operation.loads is not None and accepted.loads_of is not None:
        owner, holder = accepted.loads_of, submission.holder
        note_shared_read(services, shared_read(caller, owner, operation.loads, Purpose.LOAD, holder))
    if accepted.rate is not None:
        note_rate(Meter.TRAIN, accepted.rate, runtime.clock())
    elif operation.tokens and (operation.lines or limits.pace(Meter.TRAIN) is not None):
        # A repeat charges nothing.
        await note_stored_rate(runtime.database, operation, Meter.TRAIN, runtime.clock())
    return accepted.id


async def _operation(
    services: ApiServices, caller: Principal, run: RunStanding, submission: TrainingSubmission
) -> NewOperation | RejectedOperation:
    """Return the operation to record.

    It is a rejected one if the key's bounds forbid it, the payload cannot be built or is over the tenant's limits.

    Raises retryable errors: nothing is recorded then.
    """
    facts, kind = services.base(run.base_model), submission.kind
    identity = await off_loop(services, caller.tenant, len(submission.body), _identity, submission)
    if isinstance(submission.build, WeftError):
        return _rejected(caller, run, submission, identity, submission.build)
    try:
        _check_rights(caller, run, kind)
        size = MAX_GRAPH_BYTES if may_name_loss(submission.body) else len(submission.body)
        payload = await off_loop(services, caller.tenant, size, submission.build, facts)
        _check_limits(submission, payload, run, services.limits.with_own(run.own_limits))
        if isinstance(payload, TrainingBatch):
            payload = await with_recorded_logprobs(services, caller.tenant, payload)
    except WeftError as error:
        if error.retryable:
            # It says nothing about the request, which the SDK sends again.
            raise
        return _rejected(caller, run, submission, identity, error)
    request_id = new_request_id()
    return NewOperation(
        id=request_id,
        tenant=caller.tenant,
        lane=run.id,
        seq_id=submission.seq_id,
        kind=kind,
        base_model=run.base_model,
        payload=await services.runtime.ledger.payloads.store(caller.tenant, request_id, payload),
        digest=identity,
        tokens=_tokens(payload),
        trainer=run.trainer,
        trace_id=current_work().trace_id,
        key_id=caller.key_id,
        lines=lines_of(caller, Meter.TRAIN, run.project, run.project_limits),
        loads=parse_path(payload.path) if isinstance(payload, LoadWeights) else None,
        granted=CheckpointId(payload.granted) if isinstance(payload, LoadWeights) and payload.granted else None,
    )


def _rejected(
    caller: Principal, run: RunStanding, submission: TrainingSubmission, identity: bytes, error: WeftError
) -> RejectedOperation:
    return RejectedOperation(
        tenant=caller.tenant,
        lane=run.id,
        seq_id=submission.seq_id,
        kind=submission.kind,
        base_model=run.base_model,
        digest=identity,
        error=error,
        trainer=run.trainer,
        trace_id=current_work().trace_id,
        key_id=caller.key_id,
    )


async def _check_paid(
    services: ApiServices, caller: Principal, run: RunStanding, submission: TrainingSubmission
) -> None:
    """Raise ``BudgetSpent`` for work that takes tokens of a spent budget.

    A client that cannot pause has it wait instead. So has one whose later chunks were accepted: they wait for this number, and a
    gap that lasts is closed by a failure.
    """
    if submission.kind not in _TAKES_TOKENS or not caller.pauses_unpaid:
        return
    spent = refusal(run.spent_budgets, caller.payer, run.project, services.runtime.clock())
    if spent is None:
        return
    async with services.runtime.database.read() as session:
        if not await closes_gap(session, run.id, submission.seq_id):
            raise spent


def _check_is_new(run: RunStanding, submission: TrainingSubmission) -> None:
    """Raise ``FutureGone`` for a number that the run has passed: a repeat, whose row is found or forgotten."""
    if submission.seq_id < run.next_seq_id:
        raise FutureGone(
            f"seq_id {submission.seq_id} of this model was done long ago, and is not kept any more; go on with seq_id "
            f"{run.next_seq_id}"
        )


def _check_rights(caller: Principal, run: RunStanding, kind: OperationKind) -> None:
    """Raise ``Forbidden`` for what a key that trains may not do all the same."""
    if kind in _SAVES:
        caller.check(Scope.CHECKPOINTS_WRITE)
    if kind is not OperationKind.UNLOAD_MODEL:
        caller.check_new_work()
        caller.check_base(run.base_model)


def _check_limits(submission: TrainingSubmission, payload: Payload, run: RunStanding, limits: Limits) -> None:
    """Raise ``InvalidRequest`` for an operation too far ahead, with too much metadata, or of another optimizer."""
    ahead = submission.seq_id - run.next_seq_id
    if submission.kind is not OperationKind.UNLOAD_MODEL and ahead > limits.seq_ahead:
        raise InvalidRequest(
            f"seq_id {submission.seq_id} is {ahead} ahead of seq_id {run.next_seq_id}, which runs next in this model, and "
            f"your limit is {limits.seq_ahead}; send the requests between them first"
        )
    check_payload_metadata(payload, limits)
    if isinstance(payload, OptimStep) and payload.optimizer != run.optimizer:
        raise InvalidRequest(
            f"the model was created for {run.optimizer}, and this step is one of {payload.optimizer}; send the parameters of "
            f"{run.optimizer}"
        )


def promise(
    request_id: RequestId, *, model_id: str | None = None, sample_sequence_ids: list[str] | None = None
) -> Response:
    """Return the answer to a recorded request: the id with which ``retrieve_future`` polls for the result."""
    content: dict[str, object] = {"request_id": request_id}
    if model_id is not None:
        content["model_id"] = model_id
    if sample_sequence_ids is not None:
        content["sample_sequence_ids"] = sample_sequence_ids
    return Response(orjson.dumps(content), media_type="application/json")


def _identity(submission: TrainingSubmission) -> bytes:
    """Return the digest that is the same for a repeat and differs for a conflict.

    The sampler counter of a nameless save stays out: the SDK repeats the save under the same seq_id with a new counter.
    """
    body = submission.body
    if submission.kind is OperationKind.SAVE_WEIGHTS_FOR_SAMPLER:
        # JSON with NaN, and JSON that is nested too deep to be written again, is of no SDK.
        with suppress(orjson.JSONDecodeError, orjson.JSONEncodeError):
            fields = orjson.loads(body)
            if isinstance(fields, dict) and fields.get("path") is None:
                fields.pop("sampling_session_seq_id", None)
                body = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    return request_digest(submission.kind, body)


def _tokens(payload: Payload) -> int:
    return sum(len(datum.tokens) for datum in payload.data) if isinstance(payload, TrainingBatch) else 0
