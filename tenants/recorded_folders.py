"""Folders of the data folder that rows name: checkpoints' and the newest snapshot of each run."""

from collections.abc import Sequence

from sqlalchemy import Connection, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import Checkpoint, Run, RunState
from tenants.checkpoints import CHECKPOINTS, checkpoint_in


async def unrecorded_folders(session: AsyncSession, folders: Sequence[str]) -> list[str]:
    """Return those of the folders, all of one kind and relative to the data folder, that no row names."""
    if not folders:
        return []
    if folders[0].startswith(f"{CHECKPOINTS}/"):
        # By the id, which names the folder: the directory has no index.
        ids = [checkpoint_in(folder) for folder in folders]
        known = {*await session.scalars(select(Checkpoint.directory).where(Checkpoint.id.in_(ids)))}
    else:
        snapshots = await session.scalars(select(Run.snapshot_dir).where(Run.snapshot_dir.in_(folders)))
        known = {name for name in snapshots if name}
    return [folder for folder in folders if folder not in known]


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
