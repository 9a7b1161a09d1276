"""Holds on checkpoints: which checkpoint a ``load_weights`` loads, and that its files stay as long as it may be loaded.

A name may be given to another checkpoint, and a checkpoint may be deleted, between a request's acceptance, its turn, and each
replay of it. So the name is resolved once, and the id is recorded.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, delete, exists, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from contracts.ids import CheckpointId, RequestId, RunId, TenantId
from contracts.ledger_records import NewOperation, OperationState
from contracts.paths import CheckpointPath
from store.clock import Clock
from store.inserts import insert_unless_present
from store.tables import Checkpoint, CheckpointHold, Operation, Run, RunState
from tenants.audit import Actor, Door, actor_of_operation, record, session_of
from tenants.audit_actions import Action
from tenants.checkpoints import path_of
from tenants.runs import get_run
from tenants.sharing import find_readable


@dataclass(frozen=True, slots=True)
class Load:
    """A ``load_weights`` into a run of ``tenant``'s."""

    tenant: TenantId
    operation: RequestId
    run: RunId
    seq_id: int


async def resolve_when_accepted(transaction: AsyncSession, new: NewOperation, clock: Clock) -> TenantId | None:
    """Hold the checkpoint that an operation loads, as its path is understood now that the operation was just recorded.

    Return the checkpoint's tenant, None if nothing is held. Then the name is resolved when the operation runs, in two cases:

    - There is no checkpoint that the operation could load. It fails when it runs, unless there is one by then.
    - The checkpoint is of the operation's own run, and operations before it have not run. One of them may save the name.
    """
    path = new.loads
    run = await get_run(transaction, new.tenant, new.lane)
    if path is None or (new.granted is None and path.run_id == run.id and run.next_seq_id != new.seq_id):
        return None
    try:
        checkpoint, source = await find_loaded(transaction, new.tenant, path, new.granted, clock)
    except NotFound:
        return None
    if source.base_model != run.base_model:
        return None
    loaded = Load(new.tenant, new.id, RunId(run.id), new.seq_id)
    await hold(transaction, loaded, CheckpointId(checkpoint.id), clock)
    return TenantId(checkpoint.tenant_id)


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
    transaction: AsyncSession, load: Load, checkpoint: CheckpointId, clock: Clock, *, is_late: bool = False
) -> None:
    """Record which checkpoint the operation loads, unless that is recorded already, and tell of another tenant's.

    ``is_late``: it was not known when the operation was accepted.
    """
    inserted = insert_unless_present(transaction, CheckpointHold).values(
        operation_id=load.operation,
        tenant_id=load.tenant,
        run_id=load.run,
        seq_id=load.seq_id,
        checkpoint_id=checkpoint,
    )
    is_new = await transaction.scalar(inserted.returning(CheckpointHold.operation_id)) is not None
    # A load that creates its run is told by the run's own entry.
    found = await transaction.get(Checkpoint, checkpoint) if is_new and load.seq_id > 0 else None
    if found is not None and found.tenant_id != load.tenant:
        await _tell(transaction, load, found, clock(), is_late=is_late)


async def _tell(transaction: AsyncSession, load: Load, found: Checkpoint, now: datetime, *, is_late: bool) -> None:
    """Write the entry of the run's tenant. The checkpoint's tenant is told by who accepted the load, and here of a late one."""
    actor, path = await actor_of_operation(transaction, load.operation), str(path_of(found))
    of, told = session_of(load.run), {"from": path}
    await record(transaction, actor, Action.RUN_LOAD, load.run, tenant=load.tenant, now=now, session_id=of, after=told)
    if is_late:
        stranger = Actor(Door.SHARE, actor.name, trace_id=actor.trace_id)
        once = {"count": 1, "cause": "load", "since": now, "until": now}
        owner, of = TenantId(found.tenant_id), session_of(found.run_id)
        await record(
            transaction, stranger, Action.CHECKPOINT_READ, path, tenant=owner, now=now, session_id=of, after=once
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
