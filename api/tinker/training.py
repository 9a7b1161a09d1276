"""Passes and optimizer steps."""

import asyncio
import math
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from api.services import Caller, Services
from api.submission import OFF_LOOP_BYTES, TrainingSubmission, submit_training
from api.wire.body import OversizedBody, read_body
from api.wire.json_body import parse_json
from api.wire.schemas import AdamParams, ForwardRequest, ModelKey, OptimStepRequest
from api.wire.training_codec import check_batch, key_of, key_of_beginning, parse_proto, raw_from_json, raw_from_proto
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.operations import OperationKind, OptimStep, Payload
from store.settings import Settings

router = APIRouter(tags=["training"])

_PROTOBUF_TYPES = ("application/x-protobuf", "application/protobuf")

T = TypeVar("T")


@router.post("/forward_backward", response_class=Response)
async def forward_backward(caller: Caller, services: Services, request: Request) -> Response:
    """Accumulate gradients (or only compute, with ``forward_only``); protobuf, or JSON of SDKs up to 0.24."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() not in _PROTOBUF_TYPES:
        body = await read_body(request, services.settings.max_body_bytes)
        submission = await _json_pass(body, OperationKind.FORWARD_BACKWARD, services.settings)
        return await submit_training(services, caller, submission)
    try:
        body = await read_body(request, services.settings.max_body_bytes)
    except OversizedBody as error:
        return await submit_training(services, caller, _oversized(error))
    return await submit_training(services, caller, await _protobuf_pass(body, services.settings))


@router.post("/forward", response_class=Response)
async def forward(caller: Caller, services: Services, request: Request) -> Response:
    """Compute without gradients; JSON of SDKs up to 0.24."""
    body = await read_body(request, services.settings.max_body_bytes)
    return await submit_training(services, caller, await _json_pass(body, OperationKind.FORWARD, services.settings))


@router.post("/optim_step", response_class=Response)
async def optim_step(caller: Caller, services: Services, request: Request) -> Response:
    """Apply the accumulated gradients with AdamW and clear them."""
    body = await read_body(request, services.settings.max_body_bytes)
    key = parse_json(ModelKey, body)

    def build(_facts: BaseModelFacts) -> Payload:
        asked = parse_json(OptimStepRequest, body)
        return _checked_step(asked.optimizer_params or asked.adam_params or AdamParams())

    submission = TrainingSubmission(key.model_id, key.seq_id, OperationKind.OPTIM_STEP, body, build)
    return await submit_training(services, caller, submission)


async def _parsed(body: bytes, parse: Callable[[bytes], T]) -> T:
    """``parse(body)``, on a thread when the body is large: polls and heartbeats must not wait for it."""
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
            raise InvalidRequest(f"{kind}_input is missing")
        return check_batch(raw_from_json(given, facts, settings), facts, settings)

    return TrainingSubmission(key.model_id, key.seq_id, kind, body, build)


def _oversized(error: OversizedBody) -> TrainingSubmission:
    """The request that its first bytes name, to be recorded as failed. Raises the error itself if they name none."""
    key = key_of_beginning(error.beginning)
    if key is None:
        raise error

    def build(_facts: BaseModelFacts) -> Payload:
        raise error

    return TrainingSubmission(key[0], key[1], OperationKind.FORWARD_BACKWARD, error.beginning, build)


def _checked_step(params: AdamParams) -> OptimStep:
    if params.type not in ("adamw", "adam"):
        raise InvalidRequest(f"optimizer_params.type {params.type[:50]!r} is not offered; weft has adamw")
    fields = {
        "learning_rate": params.learning_rate,
        "beta1": params.beta1,
        "beta2": params.beta2,
        "eps": params.eps,
        "weight_decay": params.weight_decay,
        "grad_clip_norm": params.grad_clip_norm,
    }
    for name, value in fields.items():
        if not math.isfinite(value):
            raise InvalidRequest(f"adam_params.{name} must be a finite number")
    for name in ("beta1", "beta2"):
        if not 0 <= fields[name] < 1:
            raise InvalidRequest(f"adam_params.{name} must be at least 0 and below 1; got {fields[name]}")
    for name in ("learning_rate", "eps", "weight_decay"):
        if fields[name] < 0:
            raise InvalidRequest(f"adam_params.{name} must be 0 or more; got {fields[name]}")
    return OptimStep(**fields)
