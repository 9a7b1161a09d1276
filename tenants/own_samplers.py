"""Samplers of the service's own sessions, such as OpenAI clients': those sessions never end while they are used.

A client's samplers go with its session. These go once they can sample nothing any more; a request that names the same model
again makes another.
"""

from sqlalchemy import ColumnElement, delete, exists
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import Checkpoint, Operation, Sampler, Session
from tenants.sessions import IS_OWN_SESSION

IS_OWN = exists().where(Session.id == Sampler.session_id, IS_OWN_SESSION)
"""Condition that a sampler is of a session that no client has opened."""


async def forget_own_samplers(transaction: AsyncSession, *which: ColumnElement[bool]) -> None:
    """Delete those of the samplers whose checkpoint is gone and that no operation names. Live ones go with their run."""
    is_gone = Sampler.checkpoint_id.is_not(None) & ~exists().where(Checkpoint.id == Sampler.checkpoint_id)
    useless = (*which, IS_OWN, is_gone, Sampler.live_run_id.is_(None), ~exists().where(Operation.lane == Sampler.id))
    await transaction.execute(delete(Sampler).where(*useless).execution_options(synchronize_session=False))
