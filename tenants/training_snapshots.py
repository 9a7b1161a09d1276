"""Record of a run's newest training snapshot: the folder with its training state, and the last operation that it covers."""

from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RunId, TenantId
from contracts.ledger_records import RunLease
from store.tables import Run, RunState


@dataclass(frozen=True, slots=True)
class NewSnapshot:
    """A written folder to be recorded: the run's training state after operation ``seq_id``.

    ``lease`` is the one under which the state was computed; ``directory`` is relative to the data folder.
    """

    run: RunId
    tenant: TenantId
    lease: RunLease
    seq_id: int
    directory: str
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotOutcome:
    """Outcome of ``record_snapshot``.

    ``is_recorded``: the snapshot is the run's newest now. ``obsolete``: the folder to remove after the commit.
    """

    is_recorded: bool
    obsolete: str | None


async def snapshot_directory(session: AsyncSession, tenant: TenantId, run: RunId) -> str | None:
    """Return the folder of the run's newest snapshot, None if it has none."""
    return await session.scalar(select(Run.snapshot_dir).where(Run.id == run, Run.tenant_id == tenant))


async def record_snapshot(transaction: AsyncSession, new: NewSnapshot) -> SnapshotOutcome:
    """Make the snapshot the run's newest one.

    Change nothing unless all of this holds:

    - The run is ready.
    - ``new.lease`` is still valid.
    - The run's recorded snapshot is older.
    - Every operation that the new snapshot covers is final.
    """
    previous = await snapshot_directory(transaction, new.tenant, new.run)
    recorded = await transaction.scalar(
        update(Run)
        .where(Run.id == new.run, Run.tenant_id == new.tenant, Run.state == RunState.READY)
        .where(Run.snapshot_seq_id < new.seq_id, Run.next_seq_id > new.seq_id)
        .where(Run.trainer_id == new.lease.trainer, Run.lease_token == new.lease.token)
        .values(snapshot_seq_id=new.seq_id, snapshot_dir=new.directory, snapshot_bytes=new.size_bytes)
        .returning(Run.id)
    )
    if recorded is None:
        return SnapshotOutcome(is_recorded=False, obsolete=new.directory)
    return SnapshotOutcome(is_recorded=True, obsolete=previous)
