"""Holds on checkpoints: which checkpoint a ``load_weights`` loads, and that its files stay as long as it may be loaded.

A name may be given to another checkpoint, and a checkpoint may be deleted, between a request's acceptance, its turn, and each
replay of it. So the name is resolved once, and the id is recorded.
"""

from sqlalchemy import ColumnElement, and_, delete, exists, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from contracts.ids import CheckpointId, RequestId, RunId, TenantId
from contracts.ledger_records import NewOperation, OperationState
from contracts.paths import CheckpointPath
from store.clock import Clock
from store.inserts import insert_unless_present
from store.tables import Checkpoint, CheckpointHold, Operation, Run, RunState
from tenants.runs import get_run
from tenants.sharing import find_readable


async def resolve_when_accepted(transaction: AsyncSession, new: NewOperation, clock: Clock) -> None:
    """Hold the checkpoint that an operation loads, as its path is understood now that the operation was just recorded.

    Nothing is held, and the name is resolved when the operation runs, in two cases:

    - There is no checkpoint that the operation could load. It fails when it runs, unless there is one by then.
    - The checkpoint is of the operation's own run, and operations before it have not run. One of them may save the name.
    """
    path = new.loads
    run = await get_run(transaction, new.tenant, new.lane)
    if path is None or (new.granted is None and path.run_id == run.id and run.next_seq_id != new.seq_id):
        return
    try:
        checkpoint, source = await find_loaded(transaction, new.tenant, path, new.granted, clock)
    except NotFound:
        return
    if source.base_model == run.base_model:
        await hold(transaction, new.tenant, new.id, RunId(run.id), new.seq_id, CheckpointId(checkpoint.id))


async def find_loaded(
    session: AsyncSession, tenant: TenantId, path: CheckpointPath, granted: CheckpointId | None, clock: Clock
) -> tuple[Checkpoint, Run]:
    """Return the checkpoint ``granted`` when a load was accepted, else the one that ``path`` names now, and its run.

    Raises ``NotFound``.
    """
    if granted is None:
        return await find_readable(session, tenant, path, clock)
    of_grant = select(Checkpoint, Run).join(Run, Run.id == Checkpoint.run_id).where(Checkpoint.id == granted)
    row = (await session.execute(of_grant)).one_or_none()
    if row is None:
        raise NotFound(f"no checkpoint {str(path)[:400]!r}")
    return row[0], row[1]


async def hold(
    transaction: AsyncSession, tenant: TenantId, operation: RequestId, run: RunId, seq_id: int, checkpoint: CheckpointId
) -> None:
    """Record which checkpoint the operation loads, unless that is recorded already."""
    await transaction.execute(
        insert_unless_present(transaction, CheckpointHold).values(
            operation_id=operation, tenant_id=tenant, run_id=run, seq_id=seq_id, checkpoint_id=checkpoint
        )
    )


async def held_checkpoint(session: AsyncSession, tenant: TenantId, operation: RequestId) -> CheckpointId | None:
    """Return the checkpoint that the operation loads, None if its name is not resolved yet."""
    found = await session.scalar(
        select(CheckpointHold.checkpoint_id).where(
            CheckpointHold.operation_id == operation, CheckpointHold.tenant_id == tenant
        )
    )
    return None if found is None else CheckpointId(found)


def is_needed() -> ColumnElement[bool]:
    """Return the condition on a hold whose operation may be run or replayed."""
    pending = Operation.state == OperationState.PENDING
    replayed = and_(Operation.state == OperationState.DONE, Operation.seq_id > Run.snapshot_seq_id)
    return (
        exists()
        .where(
            Operation.id == CheckpointHold.operation_id,
            Run.id == CheckpointHold.run_id,
            Run.state.in_([RunState.CREATING, RunState.READY]),
            or_(pending, replayed),
        )
        .correlate(CheckpointHold)
    )


async def release_holds(transaction: AsyncSession, *, most: int) -> int:
    """Delete at most ``most`` holds that no run or replay needs any more; return how many."""
    needless = select(CheckpointHold.operation_id).where(~is_needed()).limit(most)
    gone = await transaction.scalars(
        delete(CheckpointHold)
        .where(CheckpointHold.operation_id.in_(needless))
        .returning(CheckpointHold.operation_id)
        .execution_options(synchronize_session=False)
    )
    return len(gone.all())
