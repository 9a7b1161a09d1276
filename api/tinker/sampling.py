"""Sampling sessions and samples."""

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import BaseModel

from api.services import ApiServices, Caller, Services
from api.submission import promise
from api.wire.json_body import PathId, json_body
from api.wire.sampling_codec import sample_request
from api.wire.schemas import AsampleRequest, CreateSamplingSessionRequest
from contracts.codec import digest
from contracts.errors import InvalidRequest, NotFound, SessionEnded
from contracts.ids import CheckpointId, RequestId, SessionId, TenantId
from contracts.ledger_records import NewOperation
from contracts.operations import OperationKind, SampleRequest
from contracts.paths import Segment, parse_path
from telemetry.context import current_work
from tenants.checkpoints import find_checkpoint
from tenants.samplers import NewSampler, create_sampler, get_sampler
from tenants.sessions import live_session

router = APIRouter(tags=["sampling"])


class SamplingSessionCreated(BaseModel):
    """The new sampler's id."""

    sampling_session_id: str
    type: str = "create_sampling_session"


class SamplerInfo(BaseModel):
    """What a sampler samples."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


@router.post("/create_sampling_session")
async def create_sampling_session(
    caller: Caller,
    services: Services,
    body: Annotated[CreateSamplingSessionRequest, json_body(CreateSamplingSessionRequest)],
) -> SamplingSessionCreated:
    """Open a sampler of a checkpoint, pinned to it for ever, or of the bare base."""
    new = await _described(services, caller, body)
    async with services.database.write() as transaction:
        await live_session(transaction, caller, body.session_id)
        sampler_id = await create_sampler(transaction, caller, new, services.clock)
    return SamplingSessionCreated(sampling_session_id=sampler_id)


async def _described(services: ApiServices, caller: TenantId, body: CreateSamplingSessionRequest) -> NewSampler:
    session_id = SessionId(body.session_id)
    if body.model_path is None:
        if body.base_model is None:
            raise InvalidRequest("base_model or model_path is needed")
        facts = services.base(body.base_model)
        return NewSampler(session_id, body.sampling_session_seq_id, facts.name)
    path = parse_path(body.model_path, segment=Segment.SAMPLER_WEIGHTS, field="model_path")
    async with services.database.read() as session:
        checkpoint, run = await find_checkpoint(session, caller, path, services.clock)
    if body.base_model is not None and body.base_model != run.base_model:
        raise InvalidRequest(f"base_model is {body.base_model[:300]!r}, but that of model_path is {run.base_model!r}")
    return NewSampler(
        session_id=session_id,
        sampling_session_seq_id=body.sampling_session_seq_id,
        base_model=services.base(run.base_model).name,
        model_path=str(path),
        checkpoint_id=CheckpointId(checkpoint.id),
    )


@router.get("/samplers/{sampler_id}")
async def describe_sampler(caller: Caller, services: Services, sampler_id: PathId) -> SamplerInfo:
    """What the sampler samples. Raises ``NotFound``."""
    async with services.database.read() as session:
        sampler = await get_sampler(session, caller, sampler_id)
    return SamplerInfo(sampler_id=sampler.id, base_model=sampler.base_model, model_path=sampler.model_path)


@router.post("/asample", response_class=Response)
async def asample(
    caller: Caller, services: Services, body: Annotated[AsampleRequest, json_body(AsampleRequest)]
) -> Response:
    """Sample; the answer comes by ``retrieve_future``. Raises ``NotFound``, ``InvalidRequest``, ``SequenceConflict``."""
    operation, obstacle = await sample_operation(services, caller, body)
    request_id = await accept_sample(services, operation, obstacle)
    if not isinstance(operation.payload, SampleRequest):
        raise TypeError("a sample without a sample request")
    sequence_ids = [f"{request_id}:{number}" for number in range(operation.payload.num_samples)]
    return promise(request_id, sample_sequence_ids=sequence_ids)


async def sample_operation(
    services: ApiServices, caller: TenantId, body: AsampleRequest
) -> tuple[NewOperation, SessionEnded | NotFound | None]:
    """The operation that ``body`` asks for, and why its sampler takes no new work. Raises as ``asample``."""
    if body.sampling_session_id is None or body.seq_id is None:
        raise InvalidRequest("sampling_session_id and seq_id are needed; open one with create_sampling_session")
    sampler = await services.batched_reads.samplers.standing(caller, body.sampling_session_id)
    payload = sample_request(body, services.base(sampler.base_model), services.settings)
    operation = NewOperation(
        tenant=caller,
        lane=sampler.id,
        seq_id=body.seq_id,
        kind=OperationKind.SAMPLE,
        base_model=sampler.base_model,
        payload=payload,
        digest=digest(payload),
        tokens=len(payload.prompt),
        trace_id=current_work().trace_id,
    )
    return operation, sampler.obstacle


async def accept_sample(services: ApiServices, operation: NewOperation, obstacle: Exception | None) -> RequestId:
    """Record the sample, or raise the ``obstacle``; a repeat of one that was accepted before is found all the same.

    Raises ``TooManySamples``, the SDK's sign to hold back, when the tenant has too many pending.
    """
    if obstacle is None:
        return await services.batched_reads.samples.accept(operation)
    async with services.database.read() as session:
        earlier = await services.ledger.find(
            session, lane=operation.lane, seq_id=operation.seq_id, digest=operation.digest
        )
    if earlier is None:
        raise obstacle
    return earlier
