"""Model endpoints: create, describe and unload the adapter of a training run."""

import secrets
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from api.acting import record_act
from api.authentication import TrainCaller, TrainReader
from api.json_body import json_body
from api.metadata import check_metadata
from api.route_bounds import METADATA_BODY, bounded
from api.services import ApiServices, Services
from api.training_submission import TrainingSubmission, promise, submit_training
from api.wire.request_model import DefaultingModel, Metadata, PlainText, RequestModel
from api.wire.tinker_requests import OptimizerConfig, SeqId, optimizer_of
from contracts.codec import request_digest
from contracts.errors import InvalidRequest
from contracts.ids import CheckpointId, RequestId, RunId, SessionId
from contracts.ledger_records import UNLOAD_SEQ_ID, NewOperation, new_request_id
from contracts.operations import (
    CreateModel,
    LoadWeights,
    LoraSettings,
    OperationKind,
    OptimizerName,
    Payload,
    UnloadModel,
)
from contracts.paths import parse_path
from telemetry.context import current_work
from tenants.audit_actions import Action
from tenants.project_limits import check_rank_in
from tenants.rights import Principal
from tenants.runs import NewRun, get_run, insert_run, run_id_for
from tenants.sessions import get_session, session_standing

router = APIRouter(tags=["models"])

_SEED_BITS = 63


class LoraConfig(DefaultingModel):
    """LoRA settings with the SDK's defaults."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelRequest(RequestModel):
    """Body of ``/create_model``."""

    session_id: PlainText
    model_seq_id: SeqId
    base_model: PlainText
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None


class ModelRequest(RequestModel):
    """Body of ``/get_info`` and ``/unload_model``."""

    model_id: PlainText


class ModelData(BaseModel):
    """Base model of a run; the client passes ``tokenizer_id`` to ``AutoTokenizer``."""

    arch: str
    model_name: str
    tokenizer_id: str | None


class ModelInfo(BaseModel):
    """Answer of ``/get_info``."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_name: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int
    optimizer_config: dict[str, Any]


@router.post("/create_model", response_class=Response)
@bounded(body=METADATA_BODY, is_counted=False)
async def create_model(
    caller: TrainCaller, services: Services, body: Annotated[CreateModelRequest, json_body(CreateModelRequest)]
) -> Response:
    """Open a run with a fresh adapter. The run's id is ``{session_id}:train:{model_seq_id}``."""
    facts = services.base(body.base_model)
    optimizer = new_optimizer(body.optimizer_config)
    lora = _checked_lora(services, body.lora_config or LoraConfig())
    payload = CreateModel(base_model=facts.name, lora=lora, user_metadata=body.user_metadata)
    resolved = lora if lora.seed is not None else replace(lora, seed=secrets.randbits(_SEED_BITS))
    new = NewRun(SessionId(body.session_id), body.model_seq_id, facts.name, resolved, body.user_metadata, optimizer)
    identity = request_digest(OperationKind.CREATE_MODEL, body.sent)
    return await open_run(services, caller, new, OperationKind.CREATE_MODEL, payload, identity)


async def _creation(
    services: ApiServices, caller: Principal, new: NewRun, kind: OperationKind, payload: Payload, identity: bytes
) -> NewOperation:
    """Return the operation that creates the run, its payload stored."""
    operation_id, load = new_request_id(), payload if isinstance(payload, LoadWeights) else None
    return NewOperation(
        id=operation_id,
        tenant=caller.tenant,
        lane=run_id_for(new.session_id, new.model_seq_id),
        seq_id=0,
        kind=kind,
        base_model=new.base_model,
        payload=await services.runtime.ledger.payloads.store(caller.tenant, operation_id, payload),
        digest=identity,
        trace_id=current_work().trace_id,
        key_id=caller.key_id,
        loads=None if load is None else parse_path(load.path),
        granted=CheckpointId(load.granted) if load is not None and load.granted else None,
    )


async def open_run(
    services: ApiServices, caller: Principal, new: NewRun, kind: OperationKind, payload: Payload, identity: bytes
) -> Response:
    """Record a run and the operation that creates it, number 0 of its lane, and promise the result.

    A repeat has the same ``identity``, which is the request's digest.

    A creation is accepted under a spent budget, too, and waits: SDKs take a 402 for it as final.

    Raises ``Forbidden`` for a base model or a rank beyond the bounds of the key, its tenant or the project.
    Raises ``NotFound``, ``SessionEnded``, ``SequenceConflict``, ``InvalidRequest`` for too much metadata, and
    ``TooManyOperations``, on which the SDK sends the request again.
    """
    caller.check_base(new.base_model)
    limits = services.limits_of(caller)
    caller.check_rank(new.lora.rank, limits.max_rank)
    run_id = run_id_for(new.session_id, new.model_seq_id)
    size = check_metadata(new.user_metadata, limits, "user_metadata")
    services.admission.changes.count_metadata(caller.tenant, size)

    async def opening(transaction: AsyncSession) -> RequestId | None:
        session = await session_standing(transaction, caller.reach, new.session_id)
        # A repeat is answered whatever has become of its session, and only one finds the run there.
        if not await insert_run(transaction, caller.tenant, new, services.runtime.clock):
            earlier = await services.runtime.ledger.find(transaction, lane=run_id, seq_id=0, digest=identity)
            if earlier is not None:
                return earlier
        caller.check_new_work()
        check_rank_in(session.project_name, session.project_limits, new.lora.rank)
        session.check_open()
        loaded = payload.path if isinstance(payload, LoadWeights) else None
        told = {"base_model": new.base_model, "rank": new.lora.rank, "from": loaded}
        await record_act(
            transaction, services, caller, Action.RUN_CREATE, run_id, session_id=new.session_id, after=told
        )
        return None

    operation = await _creation(services, caller, new, kind, payload, identity)
    accepting = services.training_intake.accept(operation, limits, opening)
    return promise(await services.runtime.ledger.payloads.recorded(operation, accepting), model_id=run_id)


async def earlier_opening(
    services: ApiServices, session: AsyncSession, caller: Principal, run_id: RunId, session_id: str, identity: bytes
) -> RequestId | None:
    """Return the id of the earlier request with this digest that created the run, or None.

    Raises ``NotFound`` for another tenant's session, ``SequenceConflict``.
    """
    await get_session(session, caller.reach, session_id)
    return await services.runtime.ledger.find(session, lane=run_id, seq_id=0, digest=identity)


@router.post("/get_info")
@bounded(is_counted=False)
async def get_info(
    caller: TrainReader, services: Services, body: Annotated[ModelRequest, json_body(ModelRequest)]
) -> ModelInfo:
    """Describe the run's base model and adapter, also while the adapter is being created. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        run = await get_run(session, caller.reach, body.model_id)
    facts = services.base(run.base_model)
    return ModelInfo(
        model_id=run.id,
        model_name=facts.name,
        model_data=ModelData(arch=facts.architecture, model_name=facts.name, tokenizer_id=facts.tokenizer_id),
        lora_rank=run.rank,
        optimizer_config=optimizer_config(run.optimizer),
    )


@router.post("/unload_model", response_class=Response)
@bounded(is_counted=False)
async def unload_model(
    caller: TrainCaller, services: Services, body: Annotated[ModelRequest, json_body(ModelRequest)]
) -> Response:
    """Unload the run's adapter for good, after the requests that were accepted before. Raises ``NotFound``."""
    submission = TrainingSubmission(
        body.model_id, UNLOAD_SEQ_ID, OperationKind.UNLOAD_MODEL, b"", lambda _facts: UnloadModel()
    )
    return await submit_training(services, caller, submission)


def new_optimizer(config: OptimizerConfig | None) -> OptimizerName:
    """Return the optimizer of a new run. Raises ``InvalidRequest`` for one that weft does not have."""
    return OptimizerName.ADAMW if config is None else optimizer_of(config.type, "optimizer_config.type")


def optimizer_config(name: str) -> dict[str, Any]:
    """Return the optimizer as the wire describes it."""
    return {"type": name, "version": 1} if name == OptimizerName.DIMUON else {"type": name}


def _checked_lora(services: ApiServices, config: LoraConfig) -> LoraSettings:
    most = services.runtime.settings.max_rank
    if not 1 <= config.rank <= most:
        raise InvalidRequest(f"lora_config.rank must be 1 to {most}; got {config.rank}")
    if config.seed is not None and not -(2**63) <= config.seed < 2**63:
        raise InvalidRequest("lora_config.seed must fit 64 bits")
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise InvalidRequest("lora_config: at least one of train_attn, train_mlp and train_unembed must be true")
    return LoraSettings(
        rank=config.rank,
        seed=config.seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
    )
