"""Rows of runs without the requests that make them."""

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RunId, TenantId
from store.clock import Clock
from tenants.runs import NewRun, insert_run, run_id_for


async def create_run(transaction: AsyncSession, tenant: TenantId, new: NewRun, clock: Clock) -> RunId:
    """Insert the run's row in state ``creating``, unless it exists. Its create operation is seq 0 of its lane."""
    await insert_run(transaction, tenant, new, clock)
    return run_id_for(new.session_id, new.model_seq_id)
