"""Folders of the data folder that rows name: checkpoints' and the newest snapshot of each run."""

from sqlalchemy import Connection, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import Checkpoint, Run, RunState


async def recorded_folders(session: AsyncSession) -> set[str]:
    """Return every folder that a row names, relative to the data folder."""
    checkpoints = await session.scalars(select(Checkpoint.directory))
    snapshots = await session.scalars(select(Run.snapshot_dir).where(Run.snapshot_dir.is_not(None)))
    return {*checkpoints, *(name for name in snapshots if name)}


def newest_recorded_folders(connection: Connection, most: int) -> list[str]:
    """Return the folders of the ``most`` newest checkpoints, and of the snapshots of the ``most`` runs last trained."""
    snapshots = (
        select(Run.snapshot_dir)
        .where(Run.snapshot_dir.is_not(None), Run.state == RunState.READY)
        .order_by(Run.last_request_at.desc())
        .limit(most)
    )
    checkpoints = select(Checkpoint.directory).order_by(Checkpoint.created_at.desc()).limit(most)
    return [*(name for name in connection.scalars(snapshots) if name), *connection.scalars(checkpoints)]
