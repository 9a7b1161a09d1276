"""Endpoints of an adapter's gate: pause and resume sampling, reload a version, describe the state."""

from datetime import datetime
from time import monotonic
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.authentication import GateKeeper, GateReader
from api.json_body import PathId, json_body
from api.route_bounds import Holding, bounded
from api.services import ApiServices, Services
from api.wire.request_model import RequestModel
from contracts.errors import InvalidRequest
from contracts.ids import CheckpointId, RunId
from contracts.paths import Segment, parse_path
from ledger.wakeups import cleared_samples_topic, gates_topic
from store.repeat import wait_for
from store.tables import Run
from tenants.checkpoints import find_checkpoint, get_checkpoint, newest_sampler_checkpoint
from tenants.gates import (
    Gate,
    GateMode,
    Pause,
    gate_of,
    in_flight,
    pause_gate,
    pause_ttl,
    resume_gate,
    versions_in_flight,
)
from tenants.rights import Principal
from tenants.runs import get_run
from tenants.samplers import publish_live

router = APIRouter(prefix="/adapters", tags=["adapters"])

DEFAULT_TIMEOUT_SECONDS = 30.0
LONGEST_TIMEOUT_SECONDS = 300.0
_LOOK_AGAIN_SECONDS = 0.5
"""Longest wait for a wake-up while samples drain: a sample that ends in another process may send no wake-up."""


class PauseRequest(RequestModel):
    """A pause of sampling.

    - ``mode``: ``abort`` ends samples in flight with their tokens so far, ``wait`` lets them end, ``keep`` holds them
      and continues them after the pause.
    - ``ttl_seconds``: the pause ends by itself after this time. Default: ``WEFT_PAUSE_TTL``; at most ``WEFT_LONGEST_PAUSE``.
    - ``timeout_seconds``: the answer comes once nothing is in flight, or after this time.
    - ``clear_cache``: what replicas have cached of the adapter's prompts is not read again.
    """

    mode: GateMode = GateMode.KEEP
    reason: str | None = Field(default=None, max_length=500)
    ttl_seconds: float | None = Field(default=None, gt=0)
    timeout_seconds: float = Field(default=DEFAULT_TIMEOUT_SECONDS, ge=0, le=LONGEST_TIMEOUT_SECONDS)
    clear_cache: bool = False


class ResumeRequest(RequestModel):
    """End of a pause. With ``generation``, only the pause of that generation ends, not a later one by another controller."""

    generation: Annotated[int, Field(ge=0, le=2**62)] | None = None


class ReloadRequest(RequestModel):
    """A version for live samplers: ``path`` is a ``sampler_weights`` checkpoint of this run; the newest by default."""

    path: str | None = None


class GateState(BaseModel):
    """State of an adapter's gate.

    ``state`` is ``open``, ``pausing`` (samples are still in flight) or ``paused``. ``versions`` lists the versions in
    flight on each replica.
    """

    adapter: str
    state: str
    generation: int
    mode: GateMode | None
    reason: str | None
    since: datetime | None
    expires_at: datetime | None
    in_flight: int
    versions: dict[str, list[str]]


class Reloaded(BaseModel):
    """Version that live samplers follow now."""

    adapter: str
    version: str


@router.get("/{run_id}")
async def describe(caller: GateReader, services: Services, run_id: PathId) -> GateState:
    """Describe the adapter's gate. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        run = await get_run(session, caller.reach, run_id)
        return await _state(services, session, RunId(run.id))


@router.post("/{run_id}/pause")
@bounded(holding=Holding.STREAM)
async def pause(
    caller: GateKeeper, services: Services, run_id: PathId, body: Annotated[PauseRequest, json_body(PauseRequest)]
) -> GateState:
    """Pause sampling from the adapter; new samples wait.

    A pause of a paused adapter replaces the earlier pause. Raises ``NotFound``, ``InvalidRequest`` for too long a pause.
    """
    asked = Pause(
        mode=body.mode,
        reason=body.reason,
        ttl=pause_ttl(body.ttl_seconds, services.runtime.settings),
        clear_cache=body.clear_cache,
    )
    async with services.runtime.database.write() as transaction:
        run = await get_run(transaction, caller.reach, run_id)
        gate = await pause_gate(
            transaction,
            run.id,
            tenant=caller.tenant,
            base_model=run.base_model,
            pause=asked,
            clock=services.runtime.clock,
        )
        services.runtime.ledger.announce_gates(transaction, run.base_model)
    return await _drained(services, run.base_model, RunId(run.id), gate, seconds=body.timeout_seconds)


@router.post("/{run_id}/resume")
async def resume(
    caller: GateKeeper, services: Services, run_id: PathId, body: Annotated[ResumeRequest, json_body(ResumeRequest)]
) -> GateState:
    """End the pause; an open gate stays open. Raises ``NotFound``; ``InvalidRequest`` for another generation."""
    async with services.runtime.database.write() as transaction:
        run = await get_run(transaction, caller.reach, run_id)
        await resume_gate(transaction, run.id, generation=body.generation, clock=services.runtime.clock)
        services.runtime.ledger.announce_gates(transaction, run.base_model)
        return await _state(services, transaction, RunId(run.id))


@router.post("/{run_id}/reload")
@bounded(holding=Holding.STREAM)
async def reload(
    caller: GateKeeper, services: Services, run_id: PathId, body: Annotated[ReloadRequest, json_body(ReloadRequest)]
) -> Reloaded:
    """Point the run's live samplers at one of its versions, once the replicas have loaded it.

    Raises ``NotFound``, ``InvalidRequest``, and the error of a replica that cannot load the version.
    """
    async with services.runtime.database.read() as session:
        version, run = await _version(services, session, caller, run_id, body.path)
    await services.runtime.publication.prepare(run.base_model, RunId(run.id), version)
    async with services.runtime.database.write() as transaction:
        if not await publish_live(transaction, caller.tenant, RunId(run.id), version, services.runtime.clock):
            # No sampler moved. That is no error unless the version has expired meanwhile, for which this raises.
            await get_checkpoint(transaction, caller.tenant, version, services.runtime.clock)
        services.runtime.ledger.announce_versions(transaction, run.base_model)
    return Reloaded(adapter=run.id, version=version)


async def _version(
    services: ApiServices, session: AsyncSession, caller: Principal, run_id: str, path: str | None
) -> tuple[CheckpointId, Run]:
    """Return the version at ``path``, or else the newest, and the run."""
    if path is None:
        run = await get_run(session, caller.reach, run_id)
        return await newest_sampler_checkpoint(session, caller.tenant, RunId(run.id), services.runtime.clock), run
    parsed = parse_path(path, segment=Segment.SAMPLER_WEIGHTS, field="path")
    if parsed.run_id != run_id:
        await get_run(session, caller.reach, run_id)
        raise InvalidRequest(
            f"path {path[:300]!r} is of another run; send a sampler_weights checkpoint of run {run_id}"
        )
    checkpoint, run = await find_checkpoint(session, caller.reach, parsed, services.runtime.clock)
    return CheckpointId(checkpoint.id), run


async def _drained(services: ApiServices, base_model: str, run: RunId, paused: Gate, *, seconds: float) -> GateState:
    """Return the state once nothing is in flight, another request has changed the gate, or ``seconds`` are over."""
    deadline = monotonic() + seconds
    with services.runtime.ledger.wakeups.listen(gates_topic(base_model), cleared_samples_topic(base_model)) as event:
        while True:
            async with services.runtime.database.read() as session:
                state = await _state(services, session, run)
            left = deadline - monotonic()
            if not state.in_flight or state.generation != paused.generation or left <= 0:
                return state
            await wait_for(event, min(left, _LOOK_AGAIN_SECONDS))


async def _state(services: ApiServices, session: AsyncSession, run: RunId) -> GateState:
    gate = await gate_of(session, run, services.runtime.clock)
    count = await in_flight(session, run)
    return GateState(
        adapter=run,
        state="open" if gate.mode is None else "pausing" if count else "paused",
        generation=gate.generation,
        mode=gate.mode,
        reason=gate.reason,
        since=gate.since,
        expires_at=gate.expires_at,
        in_flight=count,
        versions=await versions_in_flight(session, run),
    )
