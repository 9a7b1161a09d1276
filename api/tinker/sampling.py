"""Sampling endpoints: open a sampling session, describe a sampler, sample."""

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from api.acting import acting
from api.authentication import SampleCaller, SampleReader
from api.json_body import PathId, json_body
from api.route_bounds import PROMPT_BODY, bounded
from api.sample_submission import accept_sample, tinker_submission
from api.services import ApiServices, Services
from api.training_submission import promise
from api.wire.json_counts import DATA
from api.wire.request_model import PlainText, RequestModel
from api.wire.tinker_requests import AsampleRequest, SeqId
from contracts.errors import InvalidRequest
from contracts.ids import CheckpointId, SessionId
from contracts.paths import Segment, parse_path
from store.sampled_bases import check_can_be_sampled
from tenants.rights import Principal
from tenants.samplers import NewSampler, create_sampler, get_sampler, join_sampler
from tenants.sessions import live_session
from tenants.sharing import find_readable

router = APIRouter(tags=["sampling"])


class CreateSamplingSessionRequest(RequestModel):
    """Body of ``/create_sampling_session``."""

    session_id: PlainText
    sampling_session_seq_id: SeqId
    base_model: PlainText | None = None
    model_path: PlainText | None = None


class SamplingSessionCreated(BaseModel):
    """Id of the new sampler."""

    sampling_session_id: str
    type: str = "create_sampling_session"


class SamplerInfo(BaseModel):
    """Base model of a sampler, and the checkpoint it is pinned to, if any."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


@router.post("/create_sampling_session")
@bounded(is_counted=False)
async def create_sampling_session(
    caller: SampleCaller,
    services: Services,
    body: Annotated[CreateSamplingSessionRequest, json_body(CreateSamplingSessionRequest)],
) -> SamplingSessionCreated:
    """Open a sampler of the bare base model, or of a checkpoint; the checkpoint of a sampler never changes.

    Raises ``NotFound``, ``UnknownBaseModel``, ``SequenceConflict``, and ``InvalidRequest`` for an adapter that no sampler takes.
    """
    new = await _new_sampler(services, caller, body)
    caller.check_new_work()
    caller.check_base(new.base_model)
    limits, clock = services.limits_of(caller), services.runtime.clock
    async with services.runtime.database.write() as transaction:
        await live_session(transaction, caller.reach, body.session_id)
        sampler_id = await create_sampler(transaction, caller.tenant, new, clock, limits, actor=acting(caller))
    return SamplingSessionCreated(sampling_session_id=sampler_id)


class JoinSamplingSessionRequest(RequestModel):
    """Sampler that a copy of its client joins."""

    sampling_session_id: PlainText


class SamplingSessionJoined(BaseModel):
    """Number of the copy, from 1: its samples' seq_ids begin with a thousand million times it."""

    client_counter: int
    type: str = "join_sampling_session"


@router.post("/join_sampling_session")
@bounded(is_counted=False)
async def join_sampling_session(
    caller: SampleCaller,
    services: Services,
    body: Annotated[JoinSamplingSessionRequest, json_body(JoinSamplingSessionRequest)],
) -> SamplingSessionJoined:
    """Return a number that no other copy of the sampler's client has. Raises ``NotFound``, and the reason of an ended session."""
    async with services.runtime.database.write() as transaction:
        joined = await join_sampler(transaction, caller.reach, body.sampling_session_id)
    return SamplingSessionJoined(client_counter=joined)


async def _new_sampler(services: ApiServices, caller: Principal, body: CreateSamplingSessionRequest) -> NewSampler:
    session_id = SessionId(body.session_id)
    if body.model_path is None:
        if body.base_model is None:
            raise InvalidRequest("base_model and model_path are missing; send one of them")
        facts = services.base(body.base_model)
        return NewSampler(session_id, body.sampling_session_seq_id, facts.name)
    path = parse_path(body.model_path, segment=Segment.SAMPLER_WEIGHTS, field="model_path")
    async with services.runtime.database.read() as session:
        checkpoint, run = await find_readable(session, caller.reach, path, services.runtime.clock)
    if body.base_model is not None and body.base_model != run.base_model:
        raise InvalidRequest(
            f"base_model is {body.base_model[:300]!r}, but model_path was trained on {run.base_model!r}; leave base_model out"
        )
    facts = services.base(run.base_model)
    check_can_be_sampled(services.runtime.settings, facts, rank=run.rank, trains_head=run.train_unembed)
    return NewSampler(
        session_id=session_id,
        sampling_session_seq_id=body.sampling_session_seq_id,
        base_model=facts.name,
        model_path=str(path),
        checkpoint_id=CheckpointId(checkpoint.id),
    )


@router.get("/samplers/{sampler_id}")
@bounded(is_counted=False)
async def describe_sampler(caller: SampleReader, services: Services, sampler_id: PathId) -> SamplerInfo:
    """Describe the sampler: its base model and checkpoint. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        sampler = await get_sampler(session, caller.reach, sampler_id)
    return SamplerInfo(sampler_id=sampler.id, base_model=sampler.base_model, model_path=sampler.model_path)


@router.post("/asample", response_class=Response)
@bounded(body=PROMPT_BODY, is_counted=False)
async def asample(
    caller: SampleCaller,
    services: Services,
    request: Request,
    body: Annotated[AsampleRequest, json_body(AsampleRequest, DATA)],
) -> Response:
    """Sample from a sampler; ``retrieve_future`` returns the result.

    Raises ``NotFound``, ``InvalidRequest``, ``SequenceConflict``, ``SessionEnded``, ``TooManySamples``.
    """
    submission = await tinker_submission(services, caller, request, body)
    request_id = await accept_sample(services, submission)
    sequence_ids = [f"{request_id}:{number}" for number in range(submission.sample.num_samples)]
    return promise(request_id, sample_sequence_ids=sequence_ids)
