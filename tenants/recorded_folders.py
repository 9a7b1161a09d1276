"""Folders of the data folder that rows name: checkpoints' and deleted ones', runs' newest snapshots, staged archives, records."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import CheckpointId
from store.tables import (
    Checkpoint,
    CheckpointHold,
    DiscardedFolder,
    Run,
    RunState,
    SampleInFlight,
    WeightJob,
    WorkerProcess,
)
from tenants.checkpoint_holds import is_needed
from tenants.checkpoints import CHECKPOINTS, checkpoint_in
from tenants.trainers import RECORDS
from tenants.weight_jobs import IMPORTS, staged_folder


@dataclass(frozen=True, slots=True)
class Discarded:
    """A folder, relative to the data folder, and the checkpoint or version that it is of."""

    directory: str
    checkpoint: CheckpointId


async def unrecorded_folders(session: AsyncSession, folders: Sequence[str]) -> list[str]:
    """Return those of the folders, all of one kind and relative to the data folder, that no row names."""
    if not folders:
        return []
    if folders[0].startswith(f"{CHECKPOINTS}/"):
        # By the id, which names the folder: the directory has no index.
        ids = [checkpoint_in(folder) for folder in folders]
        recorded = select(Checkpoint.directory).where(Checkpoint.id.in_(ids))
        waiting = select(DiscardedFolder.directory).where(DiscardedFolder.directory.in_(folders))
        known = {*await session.scalars(recorded), *await session.scalars(waiting)}
    elif folders[0].startswith(f"{IMPORTS}/"):
        jobs = [folder.rpartition("/")[2] for folder in folders]
        unfinished = select(WeightJob.id).where(WeightJob.id.in_(jobs), WeightJob.finished_at.is_(None))
        known = {staged_folder(job) for job in await session.scalars(unfinished)}
    elif folders[0].startswith(f"{RECORDS}/"):
        trainers = [folder.rpartition("/")[2] for folder in folders]
        living = select(WorkerProcess.id).where(WorkerProcess.id.in_(trainers))
        known = {f"{RECORDS}/{trainer}" for trainer in await session.scalars(living)}
    else:
        snapshots = await session.scalars(select(Run.snapshot_dir).where(Run.snapshot_dir.in_(folders)))
        known = {name for name in snapshots if name}
    return [folder for folder in folders if folder not in known]


async def removable(session: AsyncSession, *, discarded_before: datetime, most: int) -> list[Discarded]:
    """Return the oldest folders that no sample in flight and no run or replay of a ``load_weights`` reads."""
    is_drawn = exists().where(SampleInFlight.version == DiscardedFolder.checkpoint_id)
    is_held = exists().where(CheckpointHold.checkpoint_id == DiscardedFolder.checkpoint_id, is_needed())
    rows = await session.execute(
        select(DiscardedFolder.directory, DiscardedFolder.checkpoint_id)
        .where(DiscardedFolder.discarded_at <= discarded_before, ~is_drawn, ~is_held)
        .order_by(DiscardedFolder.discarded_at, DiscardedFolder.directory)
        .limit(most)
    )
    return [Discarded(row.directory, CheckpointId(row.checkpoint_id)) for row in rows]


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
