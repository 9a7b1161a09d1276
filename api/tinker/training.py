"""Training endpoints: ``forward``, ``forward_backward`` and ``optim_step``."""

import math
from collections.abc import Mapping
from types import MappingProxyType

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict

from api.authentication import TrainCaller
from api.openapi_document import reads
from api.request_body import off_loop, request_body
from api.route_bounds import ANY_SIZE, JSON_DATA_BODY, bounded
from api.services import ApiServices, Services
from api.training_submission import TrainingSubmission, failed_submission, submit_json, submit_training
from api.wire.body import OversizedBody
from api.wire.json_counts import DATA
from api.wire.request_model import DefaultingModel, parse_json
from api.wire.tinker_requests import ForwardInput, ModelKey, optimizer_of
from api.wire.training_codec import check_batch, key_of, key_of_beginning, parse_proto, raw_from_json, raw_from_proto
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest, WeftError
from contracts.operations import OperationKind, OptimizerName, OptimStep, Payload
from store.settings import Settings
from tenants.rights import Principal

router = APIRouter(tags=["training"])

_PROTOBUF_TYPES = ("application/x-protobuf", "application/protobuf")


class ForwardRequest(ModelKey):
    """Body of ``/forward``, or of ``/forward_backward`` as JSON."""

    forward_input: ForwardInput | None = None
    forward_backward_input: ForwardInput | None = None


_DIMUON_FIELDS = frozenset({"type", "learning_rate", "beta1", "grad_clip_norm"})
_OTHER_DIMUON_FIELDS: Mapping[str, float] = MappingProxyType({"damping": 1e-4, "rank_lr_correction_exponent": 0.175})
"""Settings of the hosted Dimuon that SDKs 0.29.1 and 0.30.0 always send, with their defaults. weft's rule has none of them."""


class AdamParams(DefaultingModel):
    """Settings of a step with the SDK's defaults; old SDKs leave fields out. Dimuon has some of them (``_DIMUON_FIELDS``)."""

    model_config = ConfigDict(allow_inf_nan=True, extra="allow")

    type: str = "adamw"
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(ModelKey):
    """Body of ``/optim_step``: ``adam_params``, or ``optimizer_params`` with the optimiser's ``type``."""

    adam_params: AdamParams | None = None
    optimizer_params: AdamParams | None = None


@router.post("/forward_backward", response_class=Response)
@bounded(body=ANY_SIZE, is_counted=False)
@reads(ForwardRequest)
async def forward_backward(caller: TrainCaller, services: Services, request: Request) -> Response:
    """Run a batch forward and backward and add to the adapter's gradients; only forward with ``forward_only``.

    The body is a protobuf message, or JSON from SDKs up to 0.24.
    """
    if request.headers.get("content-type", "").split(";")[0].strip().lower() not in _PROTOBUF_TYPES:
        return await _json_pass(request, services, caller, OperationKind.FORWARD_BACKWARD)
    try:
        async with request_body(request, services, caller.tenant) as body:
            submission = await off_loop(
                services, caller.tenant, len(body), _protobuf_pass, body, services.runtime.settings
            )
            return await submit_training(services, caller, submission)
    except OversizedBody as error:
        return await submit_training(services, caller, _failed_pass(error.beginning, error))


@router.post("/forward", response_class=Response)
@bounded(body=JSON_DATA_BODY, is_counted=False)
@reads(ForwardRequest)
async def forward(caller: TrainCaller, services: Services, request: Request) -> Response:
    """Run a batch forward, without gradients. The body is JSON, from SDKs up to 0.24."""
    return await _json_pass(request, services, caller, OperationKind.FORWARD)


@router.post("/optim_step", response_class=Response)
@bounded(is_counted=False)
@reads(OptimStepRequest)
async def optim_step(caller: TrainCaller, services: Services, request: Request) -> Response:
    """Apply the accumulated gradients with the run's optimizer, and clear them."""

    def build(body: bytes, _facts: BaseModelFacts) -> Payload:
        asked = parse_json(OptimStepRequest, body)
        field = "adam_params" if asked.optimizer_params is None else "optimizer_params"
        return _checked_step(asked.optimizer_params or asked.adam_params or AdamParams(), field)

    return await submit_json(request, services, caller, OperationKind.OPTIM_STEP, build)


def _protobuf_pass(body: bytes, settings: Settings) -> TrainingSubmission:
    try:
        asked = parse_proto(body)
    except InvalidRequest as error:
        return _failed_pass(body, error)
    model_id, seq_id = key_of(asked.head)
    is_backward = not asked.head.forward_only
    kind = OperationKind.FORWARD_BACKWARD if is_backward else OperationKind.FORWARD

    def build(facts: BaseModelFacts) -> Payload:
        return check_batch(raw_from_proto(asked, facts, settings), facts, settings, backward=is_backward)

    return TrainingSubmission(model_id, seq_id, kind, body, build)


async def _json_pass(request: Request, services: ApiServices, caller: Principal, kind: OperationKind) -> Response:
    settings = services.runtime.settings

    def build(body: bytes, facts: BaseModelFacts) -> Payload:
        asked = parse_json(ForwardRequest, body, DATA)
        given = asked.forward_backward_input or asked.forward_input
        if given is None:
            raise InvalidRequest(f"{kind}_input is missing; send the batch in it")
        is_backward = kind is OperationKind.FORWARD_BACKWARD
        return check_batch(raw_from_json(given, facts, settings), facts, settings, backward=is_backward)

    return await submit_json(request, services, caller, kind, build, limit=JSON_DATA_BODY)


def _failed_pass(beginning: bytes, error: WeftError) -> TrainingSubmission:
    return failed_submission(key_of_beginning(beginning), OperationKind.FORWARD_BACKWARD, beginning, error)


def _check_dimuon(params: AdamParams, field: str) -> None:
    """Raise ``InvalidRequest`` for a setting that dimuon has not, or that weft's does not follow."""
    for name, default in _OTHER_DIMUON_FIELDS.items():
        if (params.model_extra or {}).get(name, default) != default:
            raise InvalidRequest(f"{field}.{name} is not applied by weft's dimuon; leave it out, or send {default:g}")
    if unknown := params.model_fields_set - _DIMUON_FIELDS - _OTHER_DIMUON_FIELDS.keys():
        raise InvalidRequest(
            f"{field}.{min(unknown)[:50]} is no setting of dimuon; it has learning_rate, beta1, grad_clip_norm"
        )


def _checked_step(params: AdamParams, field: str) -> OptimStep:
    optimizer = optimizer_of(params.type, f"{field}.type")
    if optimizer is OptimizerName.DIMUON:
        _check_dimuon(params, field)
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
    return OptimStep(**values, optimizer=optimizer)
