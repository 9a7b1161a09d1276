"""Check at a process's start that its data folder is the database's, and not the bare place where a disk is to be."""

import asyncio
import logging
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.engine import make_url

from contracts.errors import InvalidRequest
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database
from store.folder_mark import MARK, new_mark, read_mark, write_mark
from store.settings import Settings
from store.tables import Checkpoint
from tenants.checkpoints import CHECKPOINTS
from tenants.presence import mark_data_folder, marked_data_folder

log = logging.getLogger(__name__)

_OF_ANOTHER = (
    "the data folder belongs to another database, and with this one all of its files would be removed: set WEFT_DATA_DIR "
    "(--data) or WEFT_DATABASE_URL to what belongs together, or restore that database; if it is lost for good, remove the file "
    f"{MARK} from the folder"
)


def check_database_is_there(settings: Settings) -> None:
    """Raise ``InvalidRequest`` where SQLite's file is missing beside a folder that a database has marked: none is made there."""
    url = make_url(settings.resolved_database_url())
    is_missing = url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file()
    if is_missing and read_mark(DataFolder(settings.data_dir)) is not None:
        raise InvalidRequest(_OF_ANOTHER)


async def check_data_folder(database: Database, folder: DataFolder) -> None:
    """Mark the folder as this database's, unless it is marked. Raises ``InvalidRequest`` as ``check_mark_and_disk``."""
    if await check_mark_and_disk(database, folder) is not None:
        return
    async with database.write() as transaction:
        own = await mark_data_folder(transaction, new_mark(), utc_now())
    try:
        # A power cut could take the row's mark back, and leave the folder's: another database's from then on.
        await database.flush()
        found = await asyncio.to_thread(write_mark, folder, own)
    except OSError as error:
        # A full disk must not keep a service from its start.
        log.warning("the data folder could not be marked as this database's: %s", error.strerror)
        return
    if found != own:
        raise InvalidRequest(_OF_ANOTHER)


async def check_mark_and_disk(database: Database, folder: DataFolder) -> str | None:
    """Return the folder's mark, None where it has none.

    Raises ``InvalidRequest`` where the folder is another database's, or has no place for the checkpoints of this one.
    Housekeeping removes files that no row names: all of them, with another database's rows. Files that are saved before a disk
    is mounted are hidden by it, and lost to their rows. A folder that no database has marked may become this one's.
    """
    found = await asyncio.to_thread(read_mark, folder)
    async with database.read() as session:
        own = await marked_data_folder(session)
        has_checkpoints = await session.scalar(select(Checkpoint.id).limit(1)) is not None
    if found is not None and found != own:
        raise InvalidRequest(_OF_ANOTHER)
    if has_checkpoints and not await asyncio.to_thread(folder.path(CHECKPOINTS).is_dir):
        raise InvalidRequest(
            f"the database has checkpoints, and the data folder has no {CHECKPOINTS}/: mount its disk, or set WEFT_DATA_DIR to "
            f"the right folder; if their files are lost for good, make the folder {CHECKPOINTS}/ there"
        )
    return found
