"""Endpoints of an adapter's gate: pause and resume sampling, reload a version, describe the state."""

from collections.abc import Sequence
from datetime import datetime
from time import monotonic
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.acting import record_act
from api.admission import PATIENCE_SECONDS
from api.authentication import GateKeeper, GateReader
from api.json_body import PathId, json_body
from api.paging import Cursor, CursorPage, cursor_of, next_cursor
from api.route_bounds import Holding, bounded
from api.services import ApiServices, Services
from api.wire.request_model import RequestModel
from contracts.errors import InvalidRequest
from contracts.ids import CheckpointId, RunId
from contracts.paths import Segment, parse_path
from ledger.wakeups import cleared_samples_topic, gates_topic, versions_topic
from store.repeat import wait_for
from store.tables import Run
from tenants.audit_actions import Action
from tenants.checkpoints import find_checkpoint, get_checkpoint, newest_sampler_checkpoint
from tenants.followed_versions import note_reload
from tenants.gates import (
    Flight,
    Gate,
    GateMode,
    Pause,
    flights_of,
    gates_of,
    pause_gate,
    pause_ttl,
    resume_gate,
)
from tenants.rights import Principal
from tenants.runs import get_run, list_runs
from tenants.samplers import publish_live

router = APIRouter(prefix="/adapters", tags=["adapters"])
list_router = APIRouter(tags=["adapters"])
"""Under the prefix of weft's own endpoints."""

DEFAULT_TIMEOUT_SECONDS = 30.0
LONGEST_TIMEOUT_SECONDS = 300.0
_LOOK_AGAIN_SECONDS = 0.5
"""Longest wait for a wake-up while samples drain: a sample that ends in another process may send no wake-up."""


class PauseRequest(RequestModel):
    """A pause of sampling.

    - ``mode``: ``abort`` ends samples in flight with their tokens so far, ``wait`` lets them end, ``keep`` holds them
      and continues them after the pause.
    - ``ttl_seconds``: the pause ends by itself after this time. Default: ``WEFT_PAUSE_TTL``; at most ``WEFT_LONGEST_PAUSE``.
    - ``timeout_seconds``: the answer comes once nothing is in flight, or after this time. It comes earlier, with state
      ``pausing``, when the process that holds the request ends.
    - ``clear_cache``: what replicas have cached of the adapter's prompts is not read again.
    - ``generation``: pauses only if the gate is still at this generation.
    """

    mode: GateMode = GateMode.KEEP
    reason: str | None = Field(default=None, max_length=500)
    ttl_seconds: float | None = Field(default=None, gt=0)
    timeout_seconds: float = Field(default=DEFAULT_TIMEOUT_SECONDS, ge=0, le=LONGEST_TIMEOUT_SECONDS)
    clear_cache: bool = False
    generation: Annotated[int, Field(ge=0, le=2**62)] | None = None


class ResumeRequest(RequestModel):
    """End of a pause. With ``generation``, only the pause of that generation ends, not a later one by another controller."""

    generation: Annotated[int, Field(ge=0, le=2**62)] | None = None


class ReloadRequest(RequestModel):
    """A version for live samplers: ``path`` is a ``sampler_weights`` checkpoint of this run; the newest by default."""

    path: str | None = None


class GateState(BaseModel):
    """State of an adapter's gate.

    ``state`` is ``open``, ``pausing`` (samples are still in flight) or ``paused``. ``versions`` lists the versions in
    flight on each replica, ``replicas`` counts the samples.
    """

    adapter: str
    base_model: str
    state: str
    generation: int
    mode: GateMode | None
    reason: str | None
    since: datetime | None
    expires_at: datetime | None
    in_flight: int
    versions: dict[str, list[str]]
    replicas: dict[str, int]


class AdapterList(BaseModel):
    """Gates of a page of adapters, those of the newest runs first. ``next_cursor``: of the next page, null on the last one."""

    adapters: list[GateState]
    cursor: Cursor
    next_cursor: str | None


class Reloaded(BaseModel):
    """Version that live samplers follow now."""

    adapter: str
    version: str


@router.get("/{run_id}")
async def describe(caller: GateReader, services: Services, run_id: PathId) -> GateState:
    """Describe the adapter's gate. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        run = await get_run(session, caller.reach, run_id)
        return await _state(services, session, run)


@list_router.get("/adapters")
async def list_adapters(caller: GateReader, services: Services, page: CursorPage) -> AdapterList:
    """List a page of the caller's adapters with their gates, newest first. Raises ``InvalidRequest`` for a wrong cursor."""
    async with services.runtime.database.survey() as session:
        runs, total = await list_runs(session, caller.reach, limit=page.limit + 1, offset=page.offset, after=page.after)
        return AdapterList(
            adapters=await _states(services, session, runs[: page.limit]),
            cursor=cursor_of(page, total),
            next_cursor=next_cursor(page, runs),
        )


@router.post("/{run_id}/pause")
@bounded(holding=Holding.STREAM)
async def pause(
    caller: GateKeeper, services: Services, run_id: PathId, body: Annotated[PauseRequest, json_body(PauseRequest)]
) -> GateState:
    """Pause sampling from the adapter; new samples wait.

    A pause of a paused adapter replaces the earlier pause. Raises ``NotFound``; ``InvalidRequest`` for too long a pause, and
    for another generation.
    """
    asked = Pause(
        mode=body.mode,
        reason=body.reason,
        ttl=pause_ttl(body.ttl_seconds, services.runtime.settings),
        clear_cache=body.clear_cache,
        generation=body.generation,
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
        told = {
            "mode": asked.mode,
            "reason": asked.reason,
            "expires_at": gate.expires_at,
            "generation": gate.generation,
        }
        await record_act(
            transaction, services, caller, Action.GATE_PAUSE, run.id, session_id=run.session_id, after=told
        )
        services.runtime.ledger.wakeups.announce_after_commit(transaction, gates_topic(run.base_model))
    return await _drained(services, run, gate, seconds=body.timeout_seconds)


@router.post("/{run_id}/resume")
@bounded(is_counted=False)
async def resume(
    caller: GateKeeper, services: Services, run_id: PathId, body: Annotated[ResumeRequest, json_body(ResumeRequest)]
) -> GateState:
    """End the pause; an open gate stays open. Raises ``NotFound``; ``InvalidRequest`` for another generation."""
    async with services.runtime.database.write() as transaction:
        run = await get_run(transaction, caller.reach, run_id)
        gate = await resume_gate(transaction, run.id, generation=body.generation, clock=services.runtime.clock)
        told = {"generation": gate.generation}
        await record_act(
            transaction, services, caller, Action.GATE_RESUME, run.id, session_id=run.session_id, after=told
        )
        services.runtime.ledger.wakeups.announce_after_commit(transaction, gates_topic(run.base_model))
        return await _state(services, transaction, run)


@router.post("/{run_id}/reload")
@bounded(holding=Holding.STREAM)
async def reload(
    caller: GateKeeper, services: Services, run_id: PathId, body: Annotated[ReloadRequest, json_body(ReloadRequest)]
) -> Reloaded:
    """Point the run's live samplers at one of its versions, once the replicas have loaded it.

    Raises ``NotFound``, ``InvalidRequest``, ``TooManyRequests``, ``OverRate``, the error of a replica that cannot load the
    version, and ``Unavailable`` when this process ends meanwhile.
    """
    reloads = services.admission.reloads.held(caller.tenant, patience=PATIENCE_SECONDS, what="reloads in progress")
    async with reloads:
        async with services.runtime.database.read() as session:
            version, run = await _version(services, session, caller, run_id, body.path)
        # Counted before the replicas load anything.
        services.admission.changes.count(caller.tenant)
        await services.runtime.publication.prepare(run.base_model, RunId(run.id), version)
        await _follow(services, caller, run, version, body.path)
    return Reloaded(adapter=run.id, version=version)


async def _follow(services: ApiServices, caller: Principal, run: Run, version: CheckpointId, path: str | None) -> None:
    """Point the run's live samplers, and those made later, at a version that the replicas have loaded."""
    async with services.runtime.database.write() as transaction:
        if not await publish_live(transaction, caller.tenant, RunId(run.id), version, services.runtime.clock):
            # No sampler moved. That is no error unless the version has expired meanwhile, for which this raises.
            await get_checkpoint(transaction, caller.tenant, version, services.runtime.clock)
        await note_reload(transaction, caller.tenant, RunId(run.id), version, services.runtime.clock)
        told = {"version": version, "path": path}
        await record_act(
            transaction,
            services,
            caller,
            Action.RUN_RELOAD,
            run.id,
            session_id=run.session_id,
            after=told,
            is_counted=True,
        )
        services.runtime.ledger.wakeups.announce_after_commit(transaction, versions_topic(run.base_model))


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


async def _drained(services: ApiServices, run: Run, paused: Gate, *, seconds: float) -> GateState:
    """Return the state once nothing is in flight, another request has changed the gate, or ``seconds`` are over.

    A process that ends answers at once; the pause stands, and its state is asked for again.
    """
    deadline = monotonic() + seconds
    topics = gates_topic(run.base_model), cleared_samples_topic(run.base_model)
    with services.runtime.ledger.wakeups.listen(*topics) as event:
        while True:
            async with services.runtime.database.read() as session:
                state = await _state(services, session, run)
            left = deadline - monotonic()
            is_over = not state.in_flight or state.generation != paused.generation or left <= 0
            if is_over or services.runtime.wakeups.is_closed:
                return state
            await wait_for(event, min(left, _LOOK_AGAIN_SECONDS))


async def _state(services: ApiServices, session: AsyncSession, run: Run) -> GateState:
    (state,) = await _states(services, session, [run])
    return state


async def _states(services: ApiServices, session: AsyncSession, runs: Sequence[Run]) -> list[GateState]:
    """Return the state of the gate of each run, by two queries."""
    ids = [run.id for run in runs]
    gates = await gates_of(session, ids, services.runtime.clock)
    flights: dict[str, list[Flight]] = {run: [] for run in ids}
    for flight in await flights_of(session, ids):
        flights[flight.run].append(flight)
    return [_gate_state(run, gates.get(run.id, Gate()), flights[run.id]) for run in runs]


def _gate_state(run: Run, gate: Gate, flights: Sequence[Flight]) -> GateState:
    replicas: dict[str, int] = {}
    versions: dict[str, list[str]] = {}
    for flight in flights:
        replicas[flight.replica] = replicas.get(flight.replica, 0) + flight.samples
        if flight.version is not None:
            versions.setdefault(flight.replica, []).append(flight.version)
    count = sum(replicas.values())
    return GateState(
        adapter=run.id,
        base_model=run.base_model,
        state="open" if gate.mode is None else "pausing" if count else "paused",
        generation=gate.generation,
        mode=gate.mode,
        reason=gate.reason,
        since=gate.since,
        expires_at=gate.expires_at,
        in_flight=count,
        versions=versions,
        replicas=replicas,
    )
