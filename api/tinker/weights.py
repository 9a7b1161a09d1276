"""Weights endpoints: save, load and describe the weights of a run."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from api.access_tokens import Access, granted, readable
from api.authentication import TrainCaller, TrainReader
from api.json_body import json_body
from api.openapi_document import reads
from api.request_body import off_loop, request_body
from api.route_bounds import METADATA_BODY, bounded
from api.services import ApiServices, Services
from api.shared_reads import Purpose, note_shared_read, shared_read
from api.tinker.models import earlier_opening, new_optimizer, open_run, optimizer_config
from api.training_submission import promise, submit_json, submit_json_body, submit_oversized
from api.wire.body import OversizedBody
from api.wire.request_model import DefaultingModel, ListOf, Metadata, PlainText, RequestModel, parse_json
from api.wire.tinker_requests import ModelKey, OptimizerConfig, SeqId, optimizer_of
from contracts.age_recipients import check_recipients
from contracts.base_model import BaseModelFacts
from contracts.codec import request_digest
from contracts.errors import InvalidRequest, WeftError
from contracts.ids import CheckpointId, SessionId
from contracts.operations import (
    LoadWeights,
    OperationKind,
    Payload,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from contracts.paths import Segment, check_name, parse_path
from tenants.checkpoints import check_ttl, path_of
from tenants.rights import Principal
from tenants.runs import NewRun, lora_settings, run_id_for
from tenants.sharing import find_beyond_reach, find_readable

router = APIRouter(tags=["weights"])


class SaveWeightsRequest(ModelKey):
    """Body of ``/save_weights``."""

    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool | None = None
    user_metadata: Metadata | None = None


class SaveWeightsForSamplerRequest(ModelKey):
    """Body of ``/save_weights_for_sampler``, with a name in ``path`` or without."""

    path: str | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: Literal["snapshot", "inflight"] | None = None
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None


class SaveWeightsExternalRequest(ModelKey):
    """Body of ``/save_weights_external``."""

    path: str | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: ListOf[PlainText] | None = None


class LoadTarget(RequestModel):
    """Fields that are read first: with ``model_id`` the load is into that model, else into a new one.

    ``weights_access_token`` is an API key of the checkpoint's tenant. It is used for this request and kept nowhere. The other two
    are checked with all fields, since what is refused here leaves a number of the model's unused.
    """

    model_id: PlainText | None = None
    path: Any = None
    weights_access_token: Any = None


class LoadWeightsRequest(DefaultingModel):
    """Fields of both forms of ``/load_weights``."""

    path: PlainText = ""
    optimizer: bool | None = None
    base_model: PlainText | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: PlainText | None = None


class LoadIntoModelRequest(LoadWeightsRequest, ModelKey):
    """Body of the ``/load_weights`` into an existing model."""


class CreateByLoadRequest(LoadWeightsRequest):
    """Body of the ``/load_weights`` that creates a model."""

    session_id: PlainText
    model_seq_id: SeqId


class WeightsInfoRequest(RequestModel):
    """Body of ``/weights_info``."""

    tinker_path: PlainText


class WeightsInfo(BaseModel):
    """Base model and LoRA settings of a checkpoint."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: dict[str, Any]


@router.post("/save_weights", response_class=Response)
@bounded(body=METADATA_BODY, is_counted=False)
@reads(SaveWeightsRequest)
async def save_weights(caller: TrainCaller, services: Services, request: Request) -> Response:
    """Save a training checkpoint: weights and optimiser state."""

    def build(body: bytes, _facts: BaseModelFacts) -> Payload:
        asked = parse_json(SaveWeightsRequest, body)
        if asked.path is None:
            raise InvalidRequest("path is missing; send a name for the checkpoint")
        return SaveWeights(
            name=check_name(asked.path),
            ttl_seconds=check_ttl(asked.ttl_seconds),
            overwrite=bool(asked.overwrite),
            user_metadata=asked.user_metadata,
        )

    return await submit_json(request, services, caller, OperationKind.SAVE_WEIGHTS, build)


@router.post("/save_weights_for_sampler", response_class=Response)
@bounded(body=METADATA_BODY, is_counted=False)
@reads(SaveWeightsForSamplerRequest)
async def save_weights_for_sampler(caller: TrainCaller, services: Services, request: Request) -> Response:
    """Publish the run's weights for sampling, under a name or straight into a sampling session."""

    def build(body: bytes, _facts: BaseModelFacts) -> Payload:
        asked = parse_json(SaveWeightsForSamplerRequest, body)
        if asked.path is None and asked.sampling_session_seq_id is None:
            raise InvalidRequest("path and sampling_session_seq_id are missing; send one (path names the checkpoint)")
        return SaveWeightsForSampler(
            name=None if asked.path is None else check_name(asked.path),
            sampling_session_seq_id=asked.sampling_session_seq_id if asked.path is None else None,
            kind=asked.kind or "snapshot",
            ttl_seconds=check_ttl(asked.ttl_seconds),
            user_metadata=asked.user_metadata,
        )

    return await submit_json(request, services, caller, OperationKind.SAVE_WEIGHTS_FOR_SAMPLER, build)


@router.post("/save_weights_external", response_class=Response)
@bounded(body=METADATA_BODY, is_counted=False)
@reads(SaveWeightsExternalRequest)
async def save_weights_external(caller: TrainCaller, services: Services, request: Request) -> Response:
    """Save the weights as PEFT's files, for use elsewhere. With recipients, each file is encrypted to them by age."""

    def build(body: bytes, _facts: BaseModelFacts) -> Payload:
        asked = parse_json(SaveWeightsExternalRequest, body)
        if asked.path is None:
            raise InvalidRequest("path is missing; send a name for the external weights")
        return SaveWeightsExternal(
            name=check_name(asked.path),
            ttl_seconds=check_ttl(asked.ttl_seconds),
            age_recipients=check_recipients(asked.age_encryption_recipients),
        )

    return await submit_json(request, services, caller, OperationKind.SAVE_WEIGHTS_EXTERNAL, build)


@router.post("/load_weights", response_class=Response)
@bounded(body=METADATA_BODY, is_counted=False)
@reads(LoadIntoModelRequest, CreateByLoadRequest)
async def load_weights(caller: TrainCaller, services: Services, request: Request) -> Response:
    """Load a training checkpoint, into an existing model or (with a session and no model) into a new one."""

    try:
        async with request_body(request, services, caller.tenant) as body:
            target = await off_loop(services, caller.tenant, len(body), parse_json, LoadTarget, body)
            access = _access(request, target)
            if target.model_id is not None:
                held, holder = await _granted_or_refusal(services, caller, access)

                def build(body: bytes, _facts: BaseModelFacts) -> Payload:
                    asked = parse_json(LoadIntoModelRequest, body)
                    if isinstance(held, WeftError):
                        raise held
                    return _load(asked, creates=False, granted=held)

                return await submit_json_body(body, services, caller, OperationKind.LOAD_WEIGHTS, build, holder=holder)
            asked = await off_loop(services, caller.tenant, len(body), parse_json, CreateByLoadRequest, body)
            return await _create_by_load(services, caller, asked, access)
    except OversizedBody as error:
        return await submit_oversized(services, caller, OperationKind.LOAD_WEIGHTS, error)


@router.post("/weights_info")
@bounded(is_counted=False)
async def weights_info(
    caller: TrainReader, services: Services, body: Annotated[WeightsInfoRequest, json_body(WeightsInfoRequest)]
) -> WeightsInfo:
    """Describe a checkpoint: its base model and LoRA settings. Raises ``NotFound``, ``InvalidRequest``."""
    path = parse_path(body.tinker_path, field="tinker_path")
    async with services.runtime.database.read() as session:
        _, run = await find_readable(session, caller.reach, path, services.runtime.clock)
    return WeightsInfo(
        base_model=run.base_model,
        lora_rank=run.rank,
        train_unembed=run.train_unembed,
        train_mlp=run.train_mlp,
        train_attn=run.train_attn,
        optimizer_config=optimizer_config(run.optimizer),
    )


def _access(request: Request, target: LoadTarget) -> Access:
    path, token = target.path, target.weights_access_token
    return Access(request, path if isinstance(path, str) else "", token if isinstance(token, str) else None)


async def _granted_or_refusal(
    services: ApiServices, caller: Principal, access: Access
) -> tuple[CheckpointId | WeftError | None, Principal | None]:
    """Return the checkpoint that a token, or a publication beyond the key's projects, gives access to, and the token's principal.

    None: one that is looked up when the operation is accepted, or in its turn. A refusal fails the operation.
    """
    try:
        found = await granted(services, access, segment=Segment.WEIGHTS)
        if found is not None:
            return CheckpointId(found.checkpoint.id), found.holder
        path = parse_path(access.path, segment=Segment.WEIGHTS)
        async with services.runtime.database.read() as session:
            return await find_beyond_reach(session, caller.reach, path, services.runtime.clock), None
    except WeftError as refusal:
        return refusal, None


async def _create_by_load(
    services: ApiServices, caller: Principal, asked: CreateByLoadRequest, access: Access
) -> Response:
    wanted = new_optimizer(asked.optimizer_config)
    identity = request_digest(OperationKind.LOAD_WEIGHTS, asked.sent)
    run_id = run_id_for(asked.session_id, asked.model_seq_id)
    async with services.runtime.database.read() as session:
        earlier = await earlier_opening(services, session, caller, run_id, asked.session_id, identity)
        # A repeat is answered before the checkpoint is looked up: the checkpoint may be gone by now.
        if earlier is not None:
            return promise(earlier, model_id=run_id)
    found = await readable(services, caller, access, segment=Segment.WEIGHTS)
    checkpoint, source = found.checkpoint, found.run
    payload = _load(asked, creates=True, granted=CheckpointId(checkpoint.id))
    if asked.base_model is not None and asked.base_model != source.base_model:
        raise InvalidRequest(
            f"base_model is {asked.base_model[:300]!r}, but the checkpoint was trained on {source.base_model!r}; "
            "leave base_model out"
        )
    optimizer = optimizer_of(source.optimizer, "the checkpoint's optimizer") if payload.optimizer else wanted
    if asked.optimizer_config is not None and optimizer is not wanted:
        raise InvalidRequest(
            f"optimizer_config.type is {wanted}, but the checkpoint's optimizer state is that of {optimizer}; load it without "
            "the optimizer state, or leave optimizer_config out"
        )
    facts = services.base(source.base_model)
    new = NewRun(
        SessionId(asked.session_id),
        asked.model_seq_id,
        facts.name,
        lora_settings(source),
        asked.user_metadata,
        optimizer,
    )
    answer = await open_run(services, caller, new, OperationKind.LOAD_WEIGHTS, payload, identity)
    path = path_of(checkpoint)
    note_shared_read(services, shared_read(caller, checkpoint.tenant_id, path, Purpose.LOAD, found.holder))
    return answer


def _load(asked: LoadWeightsRequest, *, creates: bool, granted: CheckpointId | None) -> LoadWeights:
    path = parse_path(asked.path, segment=Segment.WEIGHTS)
    # SDK 0.3 leaves the field out and always means the whole state.
    optimizer = True if asked.optimizer is None else asked.optimizer
    return LoadWeights(
        path=str(path), optimizer=optimizer, creates=creates, user_metadata=asked.user_metadata, granted=granted
    )
