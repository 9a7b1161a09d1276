"""Weights of base models: which ones a served name stands for. A run is trained and sampled on the same weights all its life."""

from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from store.inserts import insert_unless_present
from store.tables import BaseWeights, WorkerProcess


async def accepted_fingerprint(session: AsyncSession, base_model: str) -> str | None:
    """Return the fingerprint of the base model's weights, None before their first use."""
    return await session.scalar(select(BaseWeights.fingerprint).where(BaseWeights.base_model == base_model))


async def is_known_base(session: AsyncSession, base_model: str) -> bool:
    """Return whether a process serves the base model, or has served it."""
    if await accepted_fingerprint(session, base_model) is not None:
        return True
    serving = select(WorkerProcess.id).where(WorkerProcess.base_model == base_model).limit(1)
    return await session.scalar(serving) is not None


async def record_first(transaction: AsyncSession, base_model: str, fingerprint: str, now: datetime) -> None:
    """Record the weights of the base model's first use. Later ones change nothing."""
    row = {"base_model": base_model, "fingerprint": fingerprint, "accepted_at": now}
    await transaction.execute(insert_unless_present(transaction, BaseWeights).values([row]))


async def accept_weights(transaction: AsyncSession, base_model: str, fingerprint: str, now: datetime) -> None:
    """Have the base model's name stand for these weights from now on, whatever it stood for before."""
    await record_first(transaction, base_model, fingerprint, now)
    await transaction.execute(
        update(BaseWeights)
        .where(BaseWeights.base_model == base_model, BaseWeights.fingerprint != fingerprint)
        .values(fingerprint=fingerprint, accepted_at=now)
        .execution_options(synchronize_session=False)
    )
