"""Training endpoints: ``forward``, ``forward_backward`` and ``optim_step``."""

import asyncio
import math
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from api.authentication import Caller
from api.services import Services
from api.training_submission import OFF_LOOP_BYTES, TrainingSubmission, submit_training
from api.wire.body import OversizedBody, read_body
from api.wire.request_model import DefaultingModel, RequestModel, parse_json
from api.wire.tinker_requests import ForwardInput, ModelKey
from api.wire.training_codec import check_batch, key_of, key_of_beginning, parse_proto, raw_from_json, raw_from_proto
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.operations import OperationKind, OptimStep, Payload
from store.settings import Settings

router = APIRouter(tags=["training"])

_PROTOBUF_TYPES = ("application/x-protobuf", "application/protobuf")

T = TypeVar("T")


class ForwardRequest(RequestModel):
    """Body of ``/forward``, or of ``/forward_backward`` as JSON."""

    forward_input: ForwardInput | None = None
    forward_backward_input: ForwardInput | None = None


class AdamParams(DefaultingModel):
    """AdamW settings with the SDK's defaults; old SDKs leave fields out."""

    type: str = "adamw"
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(RequestModel):
    """Body of ``/optim_step``: ``adam_params``, or ``optimizer_params`` with the optimiser's ``type``."""

    adam_params: AdamParams | None = None
    optimizer_params: AdamParams | None = None


@router.post("/forward_backward", response_class=Response)
async def forward_backward(caller: Caller, services: Services, request: Request) -> Response:
    """Run a batch forward and backward and add to the adapter's gradients; only forward with ``forward_only``.

    The body is a protobuf message, or JSON from SDKs up to 0.24.
    """
    if request.headers.get("content-type", "").split(";")[0].strip().lower() not in _PROTOBUF_TYPES:
        body = await read_body(request, services.runtime.settings.max_body_bytes)
        submission = await _json_pass(body, OperationKind.FORWARD_BACKWARD, services.runtime.settings)
        return await submit_training(services, caller, submission)
    try:
        body = await read_body(request, services.runtime.settings.max_body_bytes)
    except OversizedBody as error:
        return await submit_training(services, caller, _oversized(error))
    return await submit_training(services, caller, await _protobuf_pass(body, services.runtime.settings))


@router.post("/forward", response_class=Response)
async def forward(caller: Caller, services: Services, request: Request) -> Response:
    """Run a batch forward, without gradients. The body is JSON, from SDKs up to 0.24."""
    body = await read_body(request, services.runtime.settings.max_body_bytes)
    return await submit_training(
        services, caller, await _json_pass(body, OperationKind.FORWARD, services.runtime.settings)
    )


@router.post("/optim_step", response_class=Response)
async def optim_step(caller: Caller, services: Services, request: Request) -> Response:
    """Apply the accumulated gradients with AdamW, and clear them."""
    body = await read_body(request, services.runtime.settings.max_body_bytes)
    key = parse_json(ModelKey, body)

    def build(_facts: BaseModelFacts) -> Payload:
        asked = parse_json(OptimStepRequest, body)
        field = "adam_params" if asked.optimizer_params is None else "optimizer_params"
        return _checked_step(asked.optimizer_params or asked.adam_params or AdamParams(), field)

    submission = TrainingSubmission(key.model_id, key.seq_id, OperationKind.OPTIM_STEP, body, build)
    return await submit_training(services, caller, submission)


async def _parsed(body: bytes, parse: Callable[[bytes], T]) -> T:
    """Return ``parse(body)``; a large body is parsed on a thread, so that polls and heartbeats do not wait for it."""
    return parse(body) if len(body) <= OFF_LOOP_BYTES else await asyncio.to_thread(parse, body)


async def _protobuf_pass(body: bytes, settings: Settings) -> TrainingSubmission:
    message = await _parsed(body, parse_proto)
    model_id, seq_id = key_of(message)
    kind = OperationKind.FORWARD if message.forward_only else OperationKind.FORWARD_BACKWARD

    def build(facts: BaseModelFacts) -> Payload:
        return check_batch(raw_from_proto(message, facts, settings), facts, settings)

    return TrainingSubmission(model_id, seq_id, kind, body, build)


async def _json_pass(body: bytes, kind: OperationKind, settings: Settings) -> TrainingSubmission:
    key = await _parsed(body, lambda raw: parse_json(ModelKey, raw))

    def build(facts: BaseModelFacts) -> Payload:
        asked = parse_json(ForwardRequest, body)
        given = asked.forward_backward_input or asked.forward_input
        if given is None:
            raise InvalidRequest(f"{kind}_input is missing; send the batch in it")
        return check_batch(raw_from_json(given, facts, settings), facts, settings)

    return TrainingSubmission(key.model_id, key.seq_id, kind, body, build)


def _oversized(error: OversizedBody) -> TrainingSubmission:
    """Return the submission that fails with ``error``. Raises ``error`` unless the first bytes name a model and seq_id."""
    key = key_of_beginning(error.beginning)
    if key is None:
        raise error

    def build(_facts: BaseModelFacts) -> Payload:
        raise error

    return TrainingSubmission(key[0], key[1], OperationKind.FORWARD_BACKWARD, error.beginning, build)


def _checked_step(params: AdamParams, field: str) -> OptimStep:
    if params.type not in ("adamw", "adam"):
        raise InvalidRequest(f"{field}.type {params.type[:50]!r} is not offered; send adamw")
    values = {
        "learning_rate": params.learning_rate,
        "beta1": params.beta1,
        "beta2": params.beta2,
        "eps": params.eps,
        "weight_decay": params.weight_decay,
        "grad_clip_norm": params.grad_clip_norm,
    }
    for name, value in values.items():
        if not math.isfinite(value):
            raise InvalidRequest(f"{field}.{name} must be a finite number")
    for name in ("beta1", "beta2"):
        if not 0 <= values[name] < 1:
            raise InvalidRequest(f"{field}.{name} must be at least 0 and below 1; got {values[name]}")
    for name in ("learning_rate", "eps", "weight_decay"):
        if values[name] < 0:
            raise InvalidRequest(f"{field}.{name} must be 0 or more; got {values[name]}")
    return OptimStep(**values)
