"""The page on backups names each folder without which a restored service loses something."""

from tests.conftest import ROOT
from workers.housekeeping.retention import RETENTION_OF_FOLDERS, Ends

MADE_ANEW = {"in-hand"}
"""Folders that end with their process."""


def test_a_backup_takes_every_folder_that_rows_name() -> None:
    page = (ROOT / "docs" / "how-to" / "back-up-and-restore.md").read_text()
    copies = [line for line in page.splitlines() if line.startswith("rsync ")]
    named = [name for name, end in RETENTION_OF_FOLDERS.items() if isinstance(end, Ends) and name not in MADE_ANEW]
    assert (len(copies), "cp -a backup/*/ restored/" in page, "payloads" in named) == (2, True, True)
    for name in named:
        assert all(f"data/{name} " in line for line in copies), name
        assert f"`{name}/`" in page, name
