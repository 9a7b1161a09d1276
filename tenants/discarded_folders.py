"""The trash: folders of deleted checkpoints, which stay until the last sample and the last replay that read them have ended.

A row is written in the transaction that deletes the checkpoint's row. So a process that dies in between leaves no folder
behind. Housekeeping removes what is removable. What a dead process held is free once the process is reaped.
"""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, update
from sqlalchemy.ext.asyncio import AsyncSession

from store.inserts import insert_unless_present
from store.tables import Checkpoint, DiscardedFolder, Sampler
from tenants.own_samplers import forget_own_samplers


async def discard(transaction: AsyncSession, checkpoints: Sequence[str], now: datetime) -> int:
    """Delete the checkpoints' rows and have their folders removed; return how many rows there were."""
    if not checkpoints:
        return 0
    gone = await transaction.execute(
        delete(Checkpoint)
        .where(Checkpoint.id.in_(checkpoints))
        .returning(Checkpoint.id, Checkpoint.tenant_id, Checkpoint.directory)
        .execution_options(synchronize_session=False)
    )
    rows = [
        {"directory": row.directory, "tenant_id": row.tenant_id, "checkpoint_id": row.id, "discarded_at": now}
        for row in gone
    ]
    if rows:
        await transaction.execute(insert_unless_present(transaction, DiscardedFolder), rows)
        await forget_own_samplers(transaction, Sampler.checkpoint_id.in_([row["checkpoint_id"] for row in rows]))
    return len(rows)


async def forget_removed(transaction: AsyncSession, directories: Sequence[str]) -> None:
    """Delete the rows of folders that are removed."""
    await transaction.execute(delete(DiscardedFolder).where(DiscardedFolder.directory.in_(directories)))


async def put_last(transaction: AsyncSession, directories: Sequence[str], *, now: datetime) -> None:
    """Let folders that cannot be removed yet be asked for again after all others: they hold up nothing behind them."""
    await transaction.execute(
        update(DiscardedFolder).where(DiscardedFolder.directory.in_(directories)).values(discarded_at=now)
    )
