"""Progress of samples that a sampling process has left unfinished, kept until the sample's result is pruned."""

from collections.abc import Collection, Sequence
from typing import cast

from sqlalchemy import Table, delete, insert, literal, select, true, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RequestId, TenantId
from contracts.sample_progress import SampleProgress, SavedProgress, decode_progress, encode_progress
from store.inserts import insert_unless_present, replacing_insert
from store.pending_operations import IS_PENDING, IS_SAMPLE
from store.tables import Operation
from store.tables import SampleProgress as Row

_rows = cast(Table, Row.__table__)
_operations = cast(Table, Operation.__table__)


async def save_progress(
    transaction: AsyncSession, progresses: Sequence[tuple[TenantId, RequestId, SampleProgress]]
) -> None:
    """Save the progress of samples, in place of what was saved before."""
    rows = [
        {"operation_id": operation, "tenant_id": tenant, "is_stale": False} | _columns(progress)
        for tenant, operation, progress in progresses
    ]
    if rows:
        await transaction.execute(replacing_insert(transaction, Row), rows)


async def mark_stale(transaction: AsyncSession, process: str) -> None:
    """Mark the samples claimed by a process that has died: it had tokens that it did not save.

    Samples that wait for their gate have tokens, too, and no row in flight.
    """
    claimed = _operations.c.taken_by == process, IS_PENDING, IS_SAMPLE
    drawn = select(_operations.c.id).where(*claimed)
    await transaction.execute(update(_rows).where(_rows.c.operation_id.in_(drawn)).values(is_stale=true()))
    known = select(_rows.c.operation_id).where(_rows.c.operation_id == _operations.c.id)
    unknown = select(_operations.c.id, _operations.c.tenant_id, literal(b""), true()).where(*claimed, ~known.exists())
    columns = ["operation_id", "tenant_id", "body", "is_stale"]
    await transaction.execute(insert(_rows).from_select(columns, unknown))


async def mark_unsaved(transaction: AsyncSession, samples: Sequence[tuple[TenantId, RequestId]]) -> None:
    """Mark samples as those of a process that has died are marked: it had tokens that it could not save."""
    if not samples:
        return
    known = _rows.c.operation_id.in_([operation for _, operation in samples])
    await transaction.execute(update(_rows).where(known).values(is_stale=true()))
    rows = [
        {"operation_id": operation, "tenant_id": tenant, "body": b"", "is_stale": True} for tenant, operation in samples
    ]
    await transaction.execute(insert_unless_present(transaction, Row), rows)


async def saved_progress(session: AsyncSession, operation: RequestId) -> SavedProgress | None:
    """Return the sample's saved progress, None if it has none."""
    query = select(_rows.c.body, _rows.c.is_stale).where(_rows.c.operation_id == operation)
    row = (await session.execute(query)).one_or_none()
    return None if row is None else SavedProgress(row.body, row.is_stale)


async def complete_progress(
    transaction: AsyncSession, tenant: TenantId, operation: RequestId, progress: SampleProgress
) -> bool:
    """Replace the tenant's stale progress by one with more tokens. Return whether it did."""
    query = select(_rows.c.body).where(
        _rows.c.operation_id == operation, _rows.c.tenant_id == tenant, _rows.c.is_stale == true()
    )
    body = await transaction.scalar(query.with_for_update())
    if body is None or (body and decode_progress(body).output.drawn >= progress.output.drawn):
        return False
    # Still stale: another follower may have more.
    renewed = update(_rows).where(_rows.c.operation_id == operation).values(_columns(progress))
    await transaction.execute(renewed)
    return True


async def saved_tokens(session: AsyncSession, operations: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return the saved drawn tokens and the cached ones of the prompt, of the samples that have some saved."""
    query = select(_rows.c.operation_id, _rows.c.drawn, _rows.c.cached).where(
        _rows.c.operation_id.in_(operations), _rows.c.drawn > 0
    )
    return {row.operation_id: (row.drawn, row.cached) for row in await session.execute(query)}


def _columns(progress: SampleProgress) -> dict[str, object]:
    output = progress.output
    return {"body": encode_progress(progress), "drawn": output.drawn, "cached": output.prompt_cache_hit_tokens}


async def prune_progress(transaction: AsyncSession, operations: Collection[str]) -> None:
    """Delete the operations' progress."""
    await transaction.execute(delete(_rows).where(_rows.c.operation_id.in_(operations)))
