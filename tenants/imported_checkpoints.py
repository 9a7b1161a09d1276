"""Checkpoints that were trained elsewhere: each belongs to an ended run of its own, which says what base and settings it has."""

from dataclasses import dataclass

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import CheckpointId, TenantId
from contracts.operations import LoraSettings
from contracts.paths import CheckpointPath, Segment
from store.clock import Clock
from store.tables import Run, RunState, Session
from tenants.checkpoints import NewCheckpoint, record_checkpoint
from tenants.limits import Counted, Limits, hold_count
from tenants.runs import NewRun, create_run
from tenants.sessions import NewSession, create_session
from tenants.storage import check_storage

_SESSION = "weft import"


@dataclass(frozen=True, slots=True)
class ImportedCheckpoint:
    """A written folder of an imported adapter, to be recorded."""

    id: CheckpointId
    base_model: str
    lora: LoraSettings
    segment: Segment
    name: str
    size_bytes: int
    ttl_seconds: int | None


async def record_import(
    transaction: AsyncSession, tenant: TenantId, new: ImportedCheckpoint, clock: Clock, defaults: Limits
) -> CheckpointPath:
    """Record the checkpoint, its run and the run's session; both have ended. Return its path. Raises ``StorageFull``."""
    await hold_count(transaction, Counted.STORAGE, [tenant])
    described = NewSession([_SESSION], None, sdk_version="", project=None, display_name=_SESSION)
    # By the checkpoint's id: whoever records the same import again finds the same run.
    session = await create_session(transaction, tenant, described, clock, idempotency_key=f"import/{new.id}")
    await transaction.execute(
        update(Session).where(Session.id == session).values(ended_at=clock(), end_reason="finished")
    )
    run = await create_run(transaction, tenant, NewRun(session, 0, new.base_model, new.lora, None), clock)
    await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.UNLOADED))
    checkpoint = NewCheckpoint(
        id=new.id,
        run_id=run,
        segment=new.segment,
        name=new.name,
        size_bytes=new.size_bytes,
        ttl_seconds=new.ttl_seconds,
        listed=True,
        user_metadata=None,
    )
    await record_checkpoint(transaction, tenant, checkpoint, clock)
    await check_storage(transaction, tenant, defaults)
    return CheckpointPath(run, new.segment, new.name)
