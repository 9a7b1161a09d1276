"""Processes for operators: trainers, which can be drained, sampling processes, API processes, and those that have died."""

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.admin.acts import record_operator
from api.admin.bodies import Listed, PathId, ReasonBody, operator_body
from api.admin.services import Admin, Caller
from ledger.wakeups import trainer_topic
from store.tables import PoolState
from tenants.audit_actions import Action
from tenants.ended_processes import list_ended
from tenants.trainers import TrainerStanding, drain_trainer, find_trainer, list_trainers, undrain_trainer
from tenants.worker_standings import ApiStanding, PoolStanding, list_apis, list_pools

router = APIRouter(tags=["processes"])

ENDED_WINDOW = timedelta(hours=1)
"""Time for which a process that has died is listed."""


class ProcessBody(BaseModel):
    """A process of the service. ``lease_seconds``: time until its lease ends, below 0 once it has ended.

    ``release``: version of weft that it runs, null for a process of a version before this was told.
    """

    id: str
    host: str
    pid: int
    started_at: datetime
    is_alive: bool
    lease_seconds: float
    release: str | None


class WorkerBody(ProcessBody):
    """A process that works for a base model."""

    base_model: str


class ApiBody(ProcessBody):
    """A process that answers clients, for every base model."""


class LastPassBody(BaseModel):
    """A trainer's last pass. ``tokens`` leaves padding out, ``padding_share`` is its part of all computed positions, 0 to 1."""

    ended_at: datetime
    seconds: float
    tokens: int
    padding_share: float
    sequences: int
    adapters: int
    tenants: int


class TrainerBody(WorkerBody):
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


class PoolBody(WorkerBody):
    """A sampling process: the samples that it has claimed, and of them those that replicas draw now."""

    state: PoolState
    claimed: int
    in_flight: int


class TakeOverBody(BaseModel):
    """Runs of a dead trainer that ``trainer`` has now; null: those that no trainer has."""

    trainer: str | None
    runs: int


class EndedBody(BaseModel):
    """A process that died: its lease ended, or it was seen to exit. ``kind``: ``trainer``, ``pool`` or ``api``.

    ``runs`` and ``samples``: what it had in hand, which others took over. ``taken_over``: which trainers have those runs now.
    """

    id: str
    kind: str
    base_model: str
    host: str
    pid: int
    release: str | None
    started_at: datetime
    ended_at: datetime
    runs: int
    samples: int
    taken_over: list[TakeOverBody]


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


@router.get("/apis")
async def list_all_apis(caller: Caller, admin: Admin) -> Listed[ApiBody]:
    """List API processes, by the time of their start; all in one page."""
    del caller
    now = await admin.now()
    async with admin.runtime.database.read() as session:
        found = await list_apis(session)
    return Listed(items=[api_body(one, now) for one in found])


@router.get("/ended-processes")
async def list_ended_processes(caller: Caller, admin: Admin) -> Listed[EndedBody]:
    """List processes that died in the last hour and have been reaped, the latest first; all in one page."""
    del caller
    since = await admin.now() - ENDED_WINDOW
    async with admin.runtime.database.read() as session:
        found = await list_ended(session, since=since)
    return Listed(items=[EndedBody.model_validate(one, from_attributes=True) for one in found])


def trainer_body(one: TrainerStanding, now: datetime) -> TrainerBody:
    """Return the body of a trainer's state."""
    return TrainerBody.model_validate(_fields_of(one, now))


def pool_body(one: PoolStanding, now: datetime) -> PoolBody:
    """Return the body of a sampling process's state."""
    return PoolBody.model_validate(_fields_of(one, now))


def api_body(one: ApiStanding, now: datetime) -> ApiBody:
    """Return the body of an API process's state."""
    return ApiBody.model_validate(_fields_of(one, now))


def _fields_of(one: TrainerStanding | PoolStanding | ApiStanding, now: datetime) -> dict[str, object]:
    """Return the fields of a process's body: those of its state, and what its lease says at ``now``."""
    return asdict(one) | {"is_alive": one.expires_at > now, "lease_seconds": (one.expires_at - now).total_seconds()}
