"""Changes of checkpoints that are there, each in one statement, so that what another process deletes meanwhile is not found."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from contracts.paths import CheckpointPath
from store.clock import Clock
from store.tables import Checkpoint
from tenants.checkpoints import check_ttl, find_checkpoint
from tenants.reach import Owner


async def set_ttl(
    transaction: AsyncSession,
    owner: Owner,
    path: CheckpointPath,
    *,
    ttl_seconds: int | None,
    clock: Clock,
    longest: int = 0,
) -> tuple[datetime | None, datetime | None]:
    """Set the checkpoint to expire ``ttl_seconds`` from now, or never; return the time before and the new one.

    No time is longer than ``longest`` seconds, if that is not 0. Raises ``NotFound``, ``InvalidRequest``.
    """
    check_ttl(ttl_seconds)
    if longest and (ttl_seconds is None or ttl_seconds > longest):
        ttl_seconds = longest
    expires_at = None if ttl_seconds is None else clock() + timedelta(seconds=ttl_seconds)
    found = await change_checkpoint(transaction, owner, path, clock, {"expires_at": expires_at})
    return found.expires_at, expires_at


async def change_checkpoint(
    transaction: AsyncSession, owner: Owner, path: CheckpointPath, clock: Clock, values: Mapping[str, Any]
) -> Checkpoint:
    """Set columns of the owner's unexpired checkpoint; return it as it was before.

    Raises ``NotFound``, also if it was deleted between the two statements.
    """
    found, _ = await find_checkpoint(transaction, owner, path, clock)
    changed = await transaction.execute(
        update(Checkpoint)
        .where(Checkpoint.id == found.id)
        .values(values)
        .returning(Checkpoint.id)
        .execution_options(synchronize_session=False)
    )
    if changed.first() is None:
        raise NotFound(f"no checkpoint {str(path)[:400]!r}")
    return found
