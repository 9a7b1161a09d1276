"""Reasons for which a pending sample cannot run now: a closed gate, or no replica that takes work."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.clock import Clock
from store.tables import Checkpoint, PoolState, Sampler, WorkerProcess
from tenants.gates import Gate, gate_of, pool_gate

_POOL = "pool"
"""Kind of a sampling process."""


async def why_waits(session: AsyncSession, tenant: TenantId, sampler: str, clock: Clock) -> str | None:
    """Return why samples of ``sampler`` cannot run now, in words for the tenant; None: they can, and wait for their turn."""
    found = (
        await session.execute(
            select(Sampler.base_model, Checkpoint.run_id)
            .join(Checkpoint, Checkpoint.id == Sampler.checkpoint_id, isouter=True)
            .where(Sampler.id == sampler, Sampler.tenant_id == tenant)
        )
    ).one_or_none()
    if found is None:
        return None
    if found.run_id is not None:
        gate = await gate_of(session, found.run_id, clock)
        if gate.mode is not None:
            return _told(f"sampling from model {found.run_id} is paused", gate)
    gate = await gate_of(session, pool_gate(found.base_model), clock)
    if gate.mode is not None:
        return _told(f"sampling from {found.base_model} is paused by the operator", gate)
    return await _why_no_pool_works(session, found.base_model, clock)


async def _why_no_pool_works(session: AsyncSession, base_model: str, clock: Clock) -> str | None:
    states = set(
        await session.scalars(
            select(WorkerProcess.pool_state)
            .where(
                WorkerProcess.kind == _POOL, WorkerProcess.base_model == base_model, WorkerProcess.expires_at > clock()
            )
            .distinct()
        )
    )
    if PoolState.WORKING in states:
        return None
    if PoolState.DRAINED in states:
        return f"the operator has drained the replicas of {base_model}; the sample begins when one takes work again"
    return f"no replica of {base_model} answers; the sample begins when one does"


def _told(what: str, gate: Gate) -> str:
    until = f" until {gate.expires_at:%Y-%m-%d %H:%M:%S} UTC" if gate.expires_at is not None else ""
    return f"{what}{until}" + (f": {gate.reason}" if gate.reason else "")
