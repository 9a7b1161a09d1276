"""Files that cannot be read: gone and damaged ones are final, and a folder that is away is tried again."""

import os
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file

from contracts.errors import InvalidRequest, Unavailable
from engine.model.adapter_folder import WEIGHTS, read_tensors
from engine.model.unreadable import has_file, why_unreadable

DAMAGED = InvalidRequest("damaged")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder among others."""
    made = tmp_path / "checkpoints" / "one"
    made.mkdir(parents=True)
    return made


def test_a_file_or_a_folder_that_is_gone_is_final(folder: Path) -> None:
    for path in (folder / WEIGHTS, folder.with_name("another") / WEIGHTS):
        with pytest.raises(InvalidRequest, match="missing or damaged"):
            read_tensors(path, "cpu")


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * 100])
def test_a_damaged_file_is_final(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(InvalidRequest, match="missing or damaged"):
        read_tensors(folder / WEIGHTS, "cpu")


def test_a_file_among_folders_that_are_away_is_tried_again(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")
    folder.parent.rename(folder.parent.with_name("away"))
    with pytest.raises(Unavailable):
        read_tensors(folder / WEIGHTS, "cpu")
    with pytest.raises(Unavailable):
        has_file(folder / WEIGHTS)


def test_a_file_that_is_there_and_cannot_be_read_is_tried_again(folder: Path) -> None:
    """Errors of safetensors about a file's content quote it, and are none of the disk's whatever they say."""
    (folder / WEIGHTS).write_bytes(b"")
    assert isinstance(why_unreadable(folder / WEIGHTS, OSError(5, os.strerror(5)), DAMAGED), Unavailable)
    for error in (ValueError("no JSON"), SafetensorError("invalid offset for tensor `a (os error 5)`")):
        assert why_unreadable(folder / WEIGHTS, error, DAMAGED) is DAMAGED


def test_a_file_that_safetensors_cannot_open_is_the_disks_error(folder: Path) -> None:
    """A folder in the file's place can be opened, and not mapped."""
    (folder / WEIGHTS).mkdir()
    with pytest.raises(OSError, match="os error"):
        load_file(folder / WEIGHTS)
    with pytest.raises(FileNotFoundError):
        load_file(folder / "none")


def test_an_optional_file_is_missed_only_where_its_folder_is_seen(folder: Path) -> None:
    assert not has_file(folder / WEIGHTS)
    (folder / WEIGHTS).write_bytes(b"")
    assert has_file(folder / WEIGHTS)
