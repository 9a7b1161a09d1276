"""Training runs for operators: list them, show one with its history, move it or page it out."""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.acts import record_operator
from api.admin.bodies import After, Limit, Listed, PathId, QueryText, Reason, ReasonBody, listed, operator_body
from api.admin.repeats import Once
from api.admin.services import Admin, AdminServices, Caller
from api.waiting_body import WaitingInfo, waiting_of_run
from api.wire.request_model import PlainText, RequestModel
from contracts.errors import InvalidRequest, NotFound
from contracts.ids import RunId
from ledger.inspection import count_pending
from ledger.wakeups import handed_over_topic, shares_topic, trainer_topic
from store.tables import Run, RunState, Tenant
from tenants.audit_actions import Action
from tenants.operator_keys import Operator
from tenants.pages import page_of
from tenants.run_directives import RunDirective, direct_run, standing_directive
from tenants.run_history import MOST_EVENTS, RunEventKind, run_history
from tenants.run_leases import assign_run
from tenants.runs import weigh_run
from tenants.trainers import find_trainer, resident_runs

router = APIRouter(tags=["runs"])


class RunBody(BaseModel):
    """A training run. ``trainer_id`` is the process that leases it, null while nobody does.

    ``is_resident``: its adapter is in that process's memory, as that told some seconds ago at most.
    """

    id: str
    tenant_id: str
    base_model: str
    rank: int
    state: RunState
    trainer_id: str | None
    lease_token: int
    next_seq_id: int
    snapshot_seq_id: int
    optimizer_steps: int
    weight: float
    is_resident: bool
    created_at: datetime
    last_request_at: datetime


class NewWeight(RequestModel):
    """Weight of a run among the runs of its tenant."""

    weight: float


class DirectiveBody(BaseModel):
    """Wish of an operator that the run's trainer has not carried out yet."""

    directive: RunDirective
    target: str | None
    reason: str | None


class RunEventBody(BaseModel):
    """One event of a run's history."""

    at: datetime
    kind: RunEventKind
    trainer: str | None
    lease_token: int
    detail: str | None


class RunDetails(RunBody):
    """A run with its tenant's name, its pending operations, its directive and its history, the newest first.

    ``waiting``: why its next operation has not ended, or why its client is refused new passes; null when nothing waits.
    """

    tenant: str
    pending: int
    waiting: WaitingInfo | None
    directive: DirectiveBody | None
    events: list[RunEventBody]


class MoveRequest(RequestModel):
    """Move of a run to the trainer ``to``, its id or its beginning; null: any other one."""

    to: PlainText | None = None
    reason: Reason = ""


class Outcome(StrEnum):
    """Fate of the wish to move a run, or to have it paged out."""

    MOVES = "moves"
    ASSIGNED = "assigned"
    IS_THERE = "is_there"
    LEAVES = "leaves"
    NOT_RESIDENT = "not_resident"


class DirectedRunBody(BaseModel):
    """Outcome of a directive. ``trainer`` is the one that has the run, or that gets it now."""

    id: str
    outcome: Outcome
    trainer: str | None = None


@router.get("/runs")
async def list_runs(
    caller: Caller,
    admin: Admin,
    tenant_id: QueryText = None,
    base_model: QueryText = None,
    trainer: QueryText = None,
    state: RunState | None = None,
    after: After = None,
    limit: Limit = 50,
) -> Listed[RunBody]:
    """List runs: of a tenant, a base model, a trainer or a state."""
    del caller
    wanted = ((Run.tenant_id, tenant_id), (Run.base_model, base_model), (Run.trainer_id, trainer), (Run.state, state))
    conditions = [column == value for column, value in wanted if value is not None]
    async with admin.runtime.database.survey() as session:
        rows = await page_of(session, Run, *conditions, after=after, most=limit + 1)
        bodies = await _bodies(session, rows)
    return listed(bodies, limit, [row.id for row in rows])


@router.get("/runs/{run_id}")
async def show_run(
    caller: Caller, admin: Admin, run_id: PathId, events: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = 20
) -> RunDetails:
    """Show a run: its state, its trainer, what an operator wants of it, and its history. Raises ``NotFound``."""
    del caller
    waits = await admin.waits()
    async with admin.runtime.database.read() as session:
        found = await _found(session, run_id)
        tenant = await session.get_one(Tenant, found.tenant_id)
        directive = await standing_directive(session, run_id)
        history = await run_history(session, run_id, most=events)
        pending = await count_pending(session, run_id)
        (shown,) = await _bodies(session, [found])
        waiting = await waiting_of_run(session, waits, found)
    return RunDetails(
        **shown.model_dump(),
        tenant=tenant.name,
        pending=pending,
        waiting=waiting if waiting.reason is not None else None,
        directive=None if directive is None else DirectiveBody.model_validate(directive, from_attributes=True),
        events=[RunEventBody.model_validate(one, from_attributes=True) for one in history],
    )


@router.post("/runs/{run_id}/move")
async def move_run(
    caller: Caller,
    admin: Admin,
    request: Request,
    run_id: PathId,
    body: Annotated[MoveRequest, operator_body(MoveRequest)],
    repeats: Once,
) -> DirectedRunBody:
    """Have the run's trainer hand it to another one, in order: what is under way ends, and nothing is replayed.

    Raises ``NotFound``, ``InvalidRequest`` for a trainer that cannot have it.
    """
    async with admin.runtime.database.write() as transaction:

        async def make() -> DirectedRunBody:
            return await _move(transaction, admin, request, caller, run_id, body)

        return await repeats.once(transaction, body, DirectedRunBody, make)


async def _move(
    transaction: AsyncSession, admin: AdminServices, request: Request, caller: Operator, run: str, body: MoveRequest
) -> DirectedRunBody:
    now = admin.runtime.clock()
    found = await _found(transaction, run)
    target = None if body.to is None else await find_trainer(transaction, body.to, admin.runtime.clock)
    if target is not None and (target.base_model != found.base_model or not target.is_alive):
        raise InvalidRequest(f"trainer {target.id} is dead, or trains {target.base_model} only")
    if found.trainer_id is None:
        if target is None:
            raise InvalidRequest("no trainer has the run; name one as `to`, or leave it to the first that is free")
        await assign_run(transaction, RunId(run), target=target.id, now=now, detail=body.reason or None)
        await _record(transaction, admin, request, caller, Action.RUN_MOVE, found, target.id, body.reason)
        admin.runtime.wakeups.announce_after_commit(transaction, handed_over_topic(target.id))
        return DirectedRunBody(id=run, outcome=Outcome.ASSIGNED, trainer=target.id)
    if target is not None and target.id == found.trainer_id:
        return DirectedRunBody(id=run, outcome=Outcome.IS_THERE, trainer=target.id)
    to = None if target is None else target.id
    await direct_run(transaction, run, RunDirective.MOVE, target=to, reason=body.reason or None, now=now)
    await _record(transaction, admin, request, caller, Action.RUN_MOVE, found, to, body.reason)
    _wake(admin, transaction, found.trainer_id)
    return DirectedRunBody(id=run, outcome=Outcome.MOVES, trainer=found.trainer_id)


@router.put("/runs/{run_id}/weight")
async def weigh(
    caller: Caller,
    admin: Admin,
    request: Request,
    run_id: PathId,
    body: Annotated[NewWeight, operator_body(NewWeight)],
) -> RunBody:
    """Give the run a weight among its tenant's runs. It holds from the next pass on. Raises ``NotFound``, ``InvalidRequest``."""
    async with admin.runtime.database.write() as transaction:
        found = await _found(transaction, run_id)
        before = await weigh_run(transaction, found, body.weight)
        if before != body.weight:
            await record_operator(
                transaction,
                admin,
                request,
                caller,
                Action.RUN_WEIGH,
                run_id,
                tenant=found.tenant_id,
                session_id=found.session_id,
                before={"weight": before},
                after={"weight": body.weight},
            )
            admin.runtime.wakeups.announce_after_commit(transaction, shares_topic())
        (weighed,) = await _bodies(transaction, [found])
        return weighed


@router.post("/runs/{run_id}/eviction")
async def evict_run(
    caller: Caller,
    admin: Admin,
    request: Request,
    run_id: PathId,
    body: Annotated[ReasonBody, operator_body(ReasonBody)],
    repeats: Once,
) -> DirectedRunBody:
    """Have the run's adapter written to disk and its memory freed. Its next operation brings it back. Raises ``NotFound``."""
    async with admin.runtime.database.write() as transaction:

        async def make() -> DirectedRunBody:
            found = await _found(transaction, run_id)
            if found.trainer_id is None:
                return DirectedRunBody(id=run_id, outcome=Outcome.NOT_RESIDENT)
            now = admin.runtime.clock()
            await direct_run(transaction, run_id, RunDirective.EVICT, reason=body.reason or None, now=now)
            await _record(transaction, admin, request, caller, Action.RUN_EVICT, found, None, body.reason)
            _wake(admin, transaction, found.trainer_id)
            return DirectedRunBody(id=run_id, outcome=Outcome.LEAVES, trainer=found.trainer_id)

        return await repeats.once(transaction, body, DirectedRunBody, make)


async def _record(
    transaction: AsyncSession,
    admin: AdminServices,
    request: Request,
    caller: Operator,
    action: Action,
    run: Run,
    to: str | None,
    reason: str,
) -> None:
    told = {"from": run.trainer_id, "to": to, "reason": reason or None}
    await record_operator(
        transaction,
        admin,
        request,
        caller,
        action,
        run.id,
        tenant=run.tenant_id,
        session_id=run.session_id,
        after={name: value for name, value in told.items() if value is not None},
    )


def _wake(admin: AdminServices, transaction: AsyncSession, trainer: str) -> None:
    admin.runtime.wakeups.announce_after_commit(transaction, trainer_topic(trainer))


async def _found(session: AsyncSession, run: str) -> Run:
    found = await session.get(Run, run)
    if found is None:
        raise NotFound(f"no run {run[:150]!r}; `weft run list` shows them")
    return found


async def _bodies(session: AsyncSession, rows: Sequence[Run]) -> list[RunBody]:
    residents = await resident_runs(session, {row.trainer_id for row in rows if row.trainer_id is not None})
    columns = [name for name in RunBody.model_fields if name != "is_resident"]
    return [
        RunBody(**{name: getattr(row, name) for name in columns}, is_resident=(row.trainer_id, row.id) in residents)
        for row in rows
    ]
