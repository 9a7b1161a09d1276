"""Gates for operators: pause and resume one adapter, or all sampling of a base model."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.acts import record_operator
from api.admin.bodies import After, Limit, Listed, QueryText, Reason, listed, operator_body
from api.admin.services import Admin, Caller
from api.wire.request_model import NO_NUL, RequestModel
from contracts.errors import NotFound
from contracts.ids import TenantId
from ledger.wakeups import gates_topic
from store.database_clock import clock_of
from store.tables import AdapterGate, Run
from tenants.audit import session_of
from tenants.audit_actions import Action
from tenants.gates import Gate, GateMode, Pause, gate_of, in_flight, pause_gate, pause_ttl, pool_gate, resume_gate
from tenants.pages import page_of

router = APIRouter(tags=["gates"])

GateName = Annotated[str, Path(pattern=NO_NUL, max_length=500)]
"""A run's id or a base model's name: the pause of a base model is stored before anybody looks it up."""


class GateOf(StrEnum):
    """Samples that a gate is before: those of one run's ``adapter``, or of a base model's ``pool`` with all adapters."""

    ADAPTER = "adapter"
    POOL = "pool"


class GateBody(BaseModel):
    """A gate. It is open while ``mode`` is null; ``generation`` grows with every change."""

    key: str
    mode: GateMode | None
    generation: int
    in_flight: int
    reason: str | None
    expires_at: datetime | None


class PauseRequest(RequestModel):
    """Pause of a gate: what becomes of the samples in flight, and when the gate opens by itself (null: ``WEFT_PAUSE_TTL``)."""

    mode: GateMode = GateMode.KEEP
    reason: Reason = ""
    ttl_seconds: Annotated[float, Field(gt=0)] | None = None
    clear_cache: bool = False


@router.get("/gates")
async def list_gates(
    caller: Caller, admin: Admin, base_model: QueryText = None, after: After = None, limit: Limit = 50
) -> Listed[GateBody]:
    """List the gates that are closed."""
    del caller
    clock = await clock_of(admin.runtime.database)
    conditions: list[ColumnElement[bool]] = [AdapterGate.mode.is_not(None)]
    if base_model is not None:
        conditions.append(AdapterGate.base_model == base_model)
    async with admin.runtime.database.survey() as session:
        rows = await page_of(session, AdapterGate, *conditions, after=after, most=limit + 1)
        keys = [row.run_id for row in rows]
        bodies = [_body(key, await gate_of(session, key, clock), await in_flight(session, key)) for key in keys]
    return listed(bodies, limit, keys)


@router.get("/gates/{of}/{name:path}")
async def show_gate(caller: Caller, admin: Admin, of: GateOf, name: GateName) -> GateBody:
    """Show the gate of a run's adapter or of a base model. Raises ``NotFound`` for an unknown run."""
    del caller
    clock = await clock_of(admin.runtime.database)
    async with admin.runtime.database.read() as session:
        key, _, _ = await _named(session, of, name)
        return _body(key, await gate_of(session, key, clock), await in_flight(session, key))


@router.put("/gates/{of}/{name:path}")
async def pause(
    caller: Caller,
    admin: Admin,
    request: Request,
    of: GateOf,
    name: GateName,
    body: Annotated[PauseRequest, operator_body(PauseRequest)],
) -> GateBody:
    """Close a gate: new samples wait. Samples in flight end (wait), are cut and go on later (keep), or end now (abort).

    Raises ``NotFound`` for an unknown run, ``InvalidRequest`` for too long a pause.
    """
    asked = Pause(body.mode, body.reason or None, pause_ttl(body.ttl_seconds, admin.runtime.settings), body.clear_cache)
    clock = await clock_of(admin.runtime.database)
    async with admin.runtime.database.write() as transaction:
        key, tenant, base_model = await _named(transaction, of, name)
        gate = await pause_gate(transaction, key, tenant=tenant, base_model=base_model, pause=asked, clock=clock)
        told = {"mode": asked.mode, "reason": asked.reason, "expires_at": gate.expires_at}
        lane = None if tenant is None else session_of(key)
        await record_operator(
            transaction, admin, request, caller, Action.GATE_PAUSE, key, tenant=tenant, session_id=lane, after=told
        )
        admin.runtime.ledger.wakeups.announce_after_commit(transaction, gates_topic(base_model))
        return _body(key, gate, await in_flight(transaction, key))


@router.delete("/gates/{of}/{name:path}")
async def resume(caller: Caller, admin: Admin, request: Request, of: GateOf, name: GateName) -> GateBody:
    """Open a gate. An open gate stays open. Raises ``NotFound`` for an unknown run."""
    clock = await clock_of(admin.runtime.database)
    async with admin.runtime.database.write() as transaction:
        key, tenant, base_model = await _named(transaction, of, name)
        gate = await resume_gate(transaction, key, generation=None, clock=clock)
        lane = None if tenant is None else session_of(key)
        await record_operator(
            transaction, admin, request, caller, Action.GATE_RESUME, key, tenant=tenant, session_id=lane
        )
        admin.runtime.ledger.wakeups.announce_after_commit(transaction, gates_topic(base_model))
        return _body(key, gate, await in_flight(transaction, key))


async def _named(session: AsyncSession, of: GateOf, name: str) -> tuple[str, TenantId | None, str]:
    """Return key, tenant and base model of the gate. Raises ``NotFound``."""
    if of is GateOf.POOL:
        return pool_gate(name), None, name
    run = await session.get(Run, name)
    if run is None:
        raise NotFound(f"no run {name[:150]!r}")
    return run.id, TenantId(run.tenant_id), run.base_model


def _body(key: str, gate: Gate, count: int) -> GateBody:
    return GateBody(
        key=key,
        mode=gate.mode,
        generation=gate.generation,
        in_flight=count,
        reason=gate.reason,
        expires_at=gate.expires_at,
    )
