"""Version that samplers of a run follow, whoever asks: that of clients' live samplers, of the last reload, or the newest."""

from sqlalchemy import and_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import CheckpointId, RunId, TenantId
from store.clock import Clock
from store.tables import Checkpoint, Run, Sampler, Session
from tenants.checkpoints import is_unexpired, newest_sampler_checkpoint
from tenants.sessions import IS_OWN_SESSION


async def followed_version(session: AsyncSession, tenant: TenantId, run: RunId, clock: Clock) -> CheckpointId:
    """Return the version that a sampler of the run in one of the service's own sessions follows now.

    - The version that the live samplers of clients' open sessions follow, if there are any and it is there.
    - Else the version of the last reload, until a newer one is saved.
    - Else the newest version.

    Raises ``NotFound`` for a run without sampler weights.
    """
    if (published := await version_published(session, tenant, run, clock)) is not None:
        return published
    newest = await newest_sampler_checkpoint(session, tenant, run, clock)
    reloaded = await session.scalar(
        select(Run.reloaded_version)
        .join(Checkpoint, and_(Checkpoint.id == Run.reloaded_version, is_unexpired(clock())))
        .where(
            Run.id == run,
            Run.tenant_id == tenant,
            Run.reloaded_at >= select(Checkpoint.created_at).where(Checkpoint.id == newest).scalar_subquery(),
        )
    )
    return newest if reloaded is None else CheckpointId(reloaded)


async def version_published(session: AsyncSession, tenant: TenantId, run: RunId, clock: Clock) -> CheckpointId | None:
    """Return the version followed by the run's live samplers of clients' open sessions; None without any, or if it is gone.

    Samplers of the service's own sessions publish nothing: they would hold each other at a version for ever.
    """
    found = await session.scalar(
        select(Sampler.checkpoint_id)
        .join(Session, and_(Session.id == Sampler.session_id, Session.ended_at.is_(None), ~IS_OWN_SESSION))
        .join(Checkpoint, and_(Checkpoint.id == Sampler.checkpoint_id, is_unexpired(clock())))
        .where(Sampler.tenant_id == tenant, Sampler.live_run_id == run)
        .limit(1)
    )
    return None if found is None else CheckpointId(found)


async def note_reload(
    transaction: AsyncSession, tenant: TenantId, run: RunId, version: CheckpointId, clock: Clock
) -> None:
    """Have samplers that are made later follow ``version`` too, until a newer one is saved."""
    await transaction.execute(
        update(Run).where(Run.id == run, Run.tenant_id == tenant).values(reloaded_version=version, reloaded_at=clock())
    )
