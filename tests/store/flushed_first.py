"""Watch of SQLite's log: whether the disk keeps a commit before what it made obsolete is removed."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from store.data_folder import DataFolder
from store.database import Database


@dataclass(slots=True)
class FlushedFirst:
    """The log as the disk was last told to keep it.

    ``removed``: what was removed, each with the log that the disk kept by then.
    """

    database: str
    kept: bytes = b""
    removed: dict[str, bytes] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """SQLite's log."""
        return Path(f"{self.database}-wal")


def watch(database: Database, monkeypatch: pytest.MonkeyPatch) -> FlushedFirst:
    """Watch what the database's log is flushed for, and every removal of a stored folder or payload."""
    watched = FlushedFirst(str(database.engine.url.database))
    fsync, remove, unlink = os.fsync, DataFolder.remove, Path.unlink

    def flushed(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}") == str(watched.log):
            watched.kept = watched.log.read_bytes()
        fsync(file)

    def removed(folder: DataFolder, relative: str) -> None:
        if folder.path(relative).exists():
            watched.removed[relative] = watched.kept
        remove(folder, relative)

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        if path.parent.parent.name == "payloads":
            watched.removed[path.name] = watched.kept
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(DataFolder, "remove", removed)
    monkeypatch.setattr(Path, "unlink", unlinked)
    return watched
