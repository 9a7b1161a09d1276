"""Requeue: has an operation begun anew, as if no process had touched it."""

from dataclasses import dataclass

from sqlalchemy import and_, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind, known_kind
from store.tables import Operation, Run


@dataclass(frozen=True, slots=True)
class Requeued:
    """An operation that is to begin anew. ``trainer`` leases its run, if it is no sample and anybody does."""

    base_model: str
    kind: OperationKind
    trainer: str | None = None


async def requeue_operation(transaction: AsyncSession, operation: str) -> Requeued:
    """Forget the operation's claim and attempts, and fence off the trainer that may compute it.

    A training operation that is done is requeued while attempts count against it: its outcome stays, and replays apply it
    again. The trainer forgets the run and rebuilds it from the ledger. A sample that a living process draws may be drawn
    twice; the first outcome counts. Raises ``NotFound``, and ``InvalidRequest`` for any other operation that is final.
    """
    columns = select(Operation.kind, Operation.lane, Operation.base_model).where(Operation.id == operation)
    found = (await transaction.execute(columns)).one_or_none()
    if found is None:
        raise NotFound(f"no operation {operation[:100]!r}; `weft operation list` shows those that wait")
    kind, trainer = known_kind(found.kind), None
    if kind is not OperationKind.SAMPLE:
        # Before the operation, as when operations are completed: the order of locks is the same everywhere.
        fenced = update(Run).where(Run.id == found.lane).values(lease_token=Run.lease_token + 1)
        trainer = await transaction.scalar(fenced.returning(Run.trainer_id))
    is_replayed = and_(
        Operation.state == OperationState.DONE, Operation.kind != OperationKind.SAMPLE, Operation.attempts > 0
    )
    touched = await transaction.scalar(
        update(Operation)
        .where(Operation.id == operation, or_(Operation.state == OperationState.PENDING, is_replayed))
        .values(taken_by=None, held_by=None, attempts=0)
        .returning(Operation.id)
    )
    if touched is None:
        raise InvalidRequest(f"operation {operation[:100]} has ended already, and its client may know the outcome")
    return Requeued(found.base_model, kind, trainer)
