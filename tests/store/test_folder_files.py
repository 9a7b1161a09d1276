"""Lists and copies of a checkpoint's folder: one that cannot be seen is no empty one."""

from pathlib import Path

import pytest

from store.copied_folder import copy_folder
from store.folder_files import files_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files, one of them in a folder of its own."""
    made = tmp_path / "checkpoints" / "mine"
    (made / "peft").mkdir(parents=True)
    (made / "weights").write_bytes(b"w")
    (made / "peft" / "config").write_bytes(b"c")
    return made


def test_files_are_listed_by_their_names_below_the_folder(folder: Path) -> None:
    assert files_of(folder) == {"peft/config": folder / "peft" / "config", "weights": folder / "weights"}


def test_a_copy_has_the_same_files(folder: Path) -> None:
    copy_folder(folder, folder.with_name("copy"))
    assert {name: path.read_bytes() for name, path in files_of(folder.with_name("copy")).items()} == {
        "peft/config": b"c",
        "weights": b"w",
    }


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
def test_a_folder_that_cannot_be_seen_is_neither_listed_nor_copied(folder: Path, there: str) -> None:
    """The others stay as they are, and nothing is left behind."""
    gone = folder.with_name("gone")
    if there != "nothing":
        gone.mkdir()
    for look in (lambda: files_of(gone), lambda: copy_folder(gone, folder.with_name("copy"))):
        with pytest.raises(FileNotFoundError):
            look()
    assert {path.name for path in folder.parent.iterdir()} - {"gone"} == {"mine"}


def test_a_copy_makes_no_folder_where_the_disk_of_all_checkpoints_is_away(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        copy_folder(folder, tmp_path / "away" / "copy")
    assert not (tmp_path / "away").exists()
