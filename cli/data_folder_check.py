"""Check at a process's start that its data folder is the database's, and not the bare place where a disk is to be."""

import asyncio

from sqlalchemy import select

from contracts.errors import InvalidRequest
from store.data_folder import DataFolder
from store.database import Database
from store.tables import Checkpoint
from tenants.checkpoints import CHECKPOINTS


async def check_data_folder(database: Database, folder: DataFolder) -> None:
    """Raise ``InvalidRequest`` where the database has checkpoints and the folder has no place for any.

    Files that are saved before a disk is mounted are hidden by it, and lost to their rows.
    """
    place = folder.path(CHECKPOINTS)
    if await asyncio.to_thread(place.is_dir):
        return
    async with database.read() as session:
        found = await session.scalar(select(Checkpoint.id).limit(1))
    if found is not None:
        raise InvalidRequest(
            f"the database has checkpoints, and the data folder has no {CHECKPOINTS}/: mount its disk, or set WEFT_DATA_DIR to "
            f"the right folder; if their files are lost for good, make the folder {CHECKPOINTS}/ there"
        )
