"""Processes for operators: trainers, which can be drained, and sampling processes."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.admin.acts import record_operator
from api.admin.bodies import Listed, PathId, ReasonBody, operator_body
from api.admin.services import Admin, Caller
from ledger.wakeups import trainer_topic
from store.tables import PoolState
from tenants.audit_actions import Action
from tenants.trainers import TrainerStanding, drain_trainer, find_trainer, list_trainers, undrain_trainer
from tenants.worker_standings import PoolStanding, list_pools

router = APIRouter(tags=["processes"])


class ProcessBody(BaseModel):
    """A process of the service. ``lease_seconds``: time until its lease ends, below 0 once it has ended.

    ``release``: version of weft that it runs, null for a process of a version before this was told.
    """

    id: str
    base_model: str
    host: str
    pid: int
    started_at: datetime
    is_alive: bool
    lease_seconds: float
    release: str | None


class LastPassBody(BaseModel):
    """A trainer's last pass. ``tokens`` leaves padding out, ``padding_share`` is its part of all computed positions, 0 to 1."""

    ended_at: datetime
    seconds: float
    tokens: int
    padding_share: float
    sequences: int
    adapters: int
    tenants: int


class TrainerBody(ProcessBody):
    """A trainer, and the runs that it leases. ``drained_at`` is null while it takes runs.

    ``residents``: runs whose adapters are in its memory, null until it has told. ``replays``: adapters that it rebuilt in the
    last hour by computing operations again. ``last_pass``: told every few seconds while it trains, null before.
    """

    drained_at: datetime | None
    reason: str | None
    runs: int
    residents: int | None
    replays: int
    last_pass: LastPassBody | None


class PoolBody(ProcessBody):
    """A sampling process: the samples that it has claimed, and of them those that replicas draw now."""

    state: PoolState
    claimed: int
    in_flight: int


class DrainedTrainer(TrainerBody):
    """A trainer that gives up its runs. ``others``: trainers of its base model that take runs."""

    others: int


@router.get("/trainers")
async def list_all_trainers(caller: Caller, admin: Admin) -> Listed[TrainerBody]:
    """List trainers, by base model and time of their start; all in one page."""
    del caller
    now = await admin.now()
    async with admin.runtime.database.read() as session:
        found = await list_trainers(session, admin.runtime.clock)
    return Listed(items=[trainer_body(one, now) for one in found])


@router.put("/trainers/{trainer_id}/drain")
async def drain(
    caller: Caller,
    admin: Admin,
    request: Request,
    trainer_id: PathId,
    body: Annotated[ReasonBody, operator_body(ReasonBody)],
) -> DrainedTrainer:
    """Have a trainer hand its runs to others in order, and take none. It can be ended once it has none.

    The id's beginning is enough. Raises ``NotFound``.
    """
    runtime, now = admin.runtime, await admin.now()
    async with runtime.database.write() as transaction:
        found = await find_trainer(transaction, trainer_id, runtime.clock)
        await drain_trainer(transaction, found.id, reason=body.reason or None, now=runtime.clock())
        told = {"base_model": found.base_model, "reason": body.reason or None}
        await record_operator(
            transaction, admin, request, caller, Action.TRAINER_DRAIN, found.id, tenant=None, after=told
        )
        every = await list_trainers(transaction, runtime.clock)
        runtime.wakeups.announce_after_commit(transaction, trainer_topic(found.id))
    (drained,) = [one for one in every if one.id == found.id]
    others = [one for one in every if one.base_model == found.base_model and one.is_alive and one.drained_at is None]
    return DrainedTrainer(**trainer_body(drained, now).model_dump(), others=len(others))


@router.delete("/trainers/{trainer_id}/drain")
async def undrain(caller: Caller, admin: Admin, request: Request, trainer_id: PathId) -> TrainerBody:
    """Have a drained trainer take runs again. The id's beginning is enough. Raises ``NotFound``."""
    runtime, now = admin.runtime, await admin.now()
    async with runtime.database.write() as transaction:
        found = await find_trainer(transaction, trainer_id, runtime.clock)
        await undrain_trainer(transaction, found.id)
        await record_operator(transaction, admin, request, caller, Action.TRAINER_WORK, found.id, tenant=None)
        return trainer_body(await find_trainer(transaction, found.id, runtime.clock), now)


@router.get("/pools")
async def list_all_pools(caller: Caller, admin: Admin) -> Listed[PoolBody]:
    """List sampling processes, by base model and time of their start; all in one page."""
    del caller
    now = await admin.now()
    async with admin.runtime.database.read() as session:
        found = await list_pools(session)
    return Listed(items=[pool_body(one, now) for one in found])


def trainer_body(one: TrainerStanding, now: datetime) -> TrainerBody:
    """Return the body of a trainer's state."""
    return TrainerBody(
        id=one.id,
        base_model=one.base_model,
        host=one.host,
        pid=one.pid,
        started_at=one.started_at,
        is_alive=one.expires_at > now,
        lease_seconds=(one.expires_at - now).total_seconds(),
        release=one.release,
        drained_at=one.drained_at,
        reason=one.reason,
        runs=one.runs,
        residents=one.residents,
        replays=one.replays,
        last_pass=None if one.last_pass is None else LastPassBody(**asdict(one.last_pass)),
    )


def pool_body(one: PoolStanding, now: datetime) -> PoolBody:
    """Return the body of a sampling process's state."""
    return PoolBody(
        id=one.id,
        base_model=one.base_model,
        host=one.host,
        pid=one.pid,
        started_at=one.started_at,
        is_alive=one.expires_at > now,
        lease_seconds=(one.expires_at - now).total_seconds(),
        release=one.release,
        state=one.state,
        claimed=one.claimed,
        in_flight=one.in_flight,
    )
