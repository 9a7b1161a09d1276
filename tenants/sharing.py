"""Sharing of checkpoints between tenants: published ones, which every tenant may use, and ones that a key gives access to.

A published checkpoint can be sampled, trained from and copied, not changed, deleted or downloaded as it is. Taking the
publication back ends what still draws from it: another tenant's next sample is refused, and one that waits for a replica
fails. A load that was accepted before is done.
"""

from sqlalchemy import select, true
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import Forbidden, NotFound
from contracts.ids import CheckpointId
from contracts.paths import CheckpointPath
from store.clock import Clock
from store.tables import Checkpoint, Run
from tenants.checkpoint_changes import change_checkpoint
from tenants.checkpoints import find_checkpoint, is_unexpired
from tenants.reach import Owner, check_lane
from tenants.rights import Principal, Scope


async def set_public(
    transaction: AsyncSession, owner: Owner, path: CheckpointPath, clock: Clock, *, public: bool
) -> None:
    """Publish the owner's checkpoint to all tenants, or take that back. A repeat does nothing. Raises ``NotFound``."""
    await change_checkpoint(transaction, owner, path, clock, {"public": public})


async def find_readable(
    session: AsyncSession, owner: Owner, path: CheckpointPath, clock: Clock
) -> tuple[Checkpoint, Run]:
    """Return the unexpired checkpoint at ``path``, the owner's or a published one, and its run. Raises ``NotFound``."""
    try:
        return await find_checkpoint(session, owner, path, clock)
    except NotFound:
        row = (
            await session.execute(
                select(Checkpoint, Run)
                .join(Run, Run.id == Checkpoint.run_id)
                .where(
                    Checkpoint.run_id == path.run_id,
                    Checkpoint.segment == path.segment,
                    Checkpoint.name == path.name,
                    Checkpoint.public == true(),
                    is_unexpired(clock()),
                )
            )
        ).one_or_none()
        if row is None:
            raise
        return row[0], row[1]


async def find_beyond_reach(
    session: AsyncSession, owner: Owner, path: CheckpointPath, clock: Clock
) -> CheckpointId | None:
    """Return the published checkpoint at ``path`` if its run is not the owner's; None if it is, or the owner is a tenant.

    A tenant's paths are looked up when they are used. Raises ``NotFound``.
    """
    missing = NotFound(f"no checkpoint {str(path)[:400]!r}")
    try:
        await check_lane(session, owner, path.run_id, missing)
    except NotFound:
        found, _ = await find_readable(session, owner, path, clock)
        return CheckpointId(found.id)
    return None


async def find_granted(
    session: AsyncSession, holder: Principal, path: CheckpointPath, clock: Clock
) -> tuple[Checkpoint, Run]:
    """Return the checkpoint that the key of ``holder``, sent as an access token, gives access to.

    Raises ``Forbidden`` for a key that may not download, and ``NotFound``.
    """
    holder.check_address()
    holder.check_not_blocked()
    holder.check(Scope.CHECKPOINTS_DOWNLOAD)
    found, run = await find_checkpoint(session, holder.reach, path, clock)
    try:
        holder.check_base(run.base_model)
    except Forbidden as refusal:
        raise NotFound(f"no checkpoint {str(path)[:400]!r}") from refusal
    return found, run
