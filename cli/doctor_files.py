"""``weft doctor`` for the files that rows name: a data folder without them is another one, or was restored without them."""

from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import SQLAlchemyError

from cli.finding import Finding
from ledger.payload_files import recorded_payload_files
from migrations.upgrade import sync_url
from store.data_folder import DataFolder
from store.settings import Settings
from tenants.recorded_folders import newest_recorded_folders

_PART = "recorded files"
_MOST_LOOKED_FOR = 1000
"""Folders of one kind, or files, that are looked for."""


def examine_recorded_files(settings: Settings) -> Finding:
    """Look for the newest folders and some files of payloads. The database answers and has this code's schema."""
    engine = create_engine(sync_url(settings.resolved_database_url()))
    try:
        with engine.connect() as connection:
            return _examine(connection, settings)
    except SQLAlchemyError as error:
        return Finding("database", False, f"cannot be asked: {type(error).__name__}; look at its log")
    finally:
        engine.dispose()


def _examine(connection: Connection, settings: Settings) -> Finding:
    folder = DataFolder(settings.data_dir)
    missing = [name for name in _named(connection) if not folder.path(name).exists()]
    connection.rollback()
    # A snapshot that was replaced meanwhile is gone, and so is the file of a payload, but no row names it any more.
    named = _named(connection)
    missing = [name for name in missing if name in named]
    if missing:
        return Finding(
            _PART,
            False,
            f"{len(missing)} of the {len(named)} folders and payload files looked for are not in {settings.data_dir}, "
            f"such as {missing[0]}: mount the folder that every process of weft shares, or restore it",
        )
    return Finding(_PART, True, f"the {len(named)} folders and payload files looked for are there")


def _named(connection: Connection) -> list[str]:
    return [
        *newest_recorded_folders(connection, _MOST_LOOKED_FOR),
        *recorded_payload_files(connection, _MOST_LOOKED_FOR),
    ]
