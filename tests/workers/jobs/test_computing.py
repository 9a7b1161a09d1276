"""The work of jobs by itself, without a process: every way to fail is an answer."""

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from engine.model.adapter_import import ImportBounds
from engine.model.skeleton import read_names
from workers.jobs import computing
from workers.jobs.computing import do
from workers.jobs.work import Answer, Failed, ImportWork, MergeWork, Postponed, Refused


def merged(base: Path, folder: Path) -> Answer:
    """The answer to a merge of no adapter."""
    return do(
        MergeWork(base, read_names(base), folder / "adapter", folder / "new", folder / "old", None, 10**9),
        lambda done, total: None,
    )


def test_what_an_attempt_has_left_goes_and_an_adapter_that_is_none_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Another checkpoint's folder stays."""
    for name in ("old", ".old.half", "older"):
        (tmp_path / name).mkdir()
    found = merged(tiny_model_dir, tmp_path)
    assert isinstance(found, Refused)
    assert "missing or damaged" in found.message
    assert [path.name for path in tmp_path.iterdir()] == ["older"]


@pytest.mark.parametrize("failure", [KeyError("model"), ValueError("no such thing"), OverflowError(), MemoryError()])
def test_an_unforeseen_failure_is_an_answer(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """A process that ended of it would have its job tried again. What is refused after it is refused as ever."""

    def fail(*_: object) -> NoReturn:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(computing, "MergeSource", fail)
        found = merged(tiny_model_dir, tmp_path)
    assert isinstance(found, Failed)
    assert type(failure).__name__ in found.traceback
    assert isinstance(merged(tiny_model_dir, tmp_path), Refused)


@pytest.mark.parametrize(("number", "answer"), [(errno.ENOSPC, Failed), (errno.EIO, Postponed)])
def test_an_import_waits_for_a_disk_that_cannot_read_and_not_for_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, answer: type[Answer]
) -> None:
    """Another archive's folder stays as it is."""
    for name in ("mine", "theirs"):
        (tmp_path / "imports" / name).mkdir(parents=True)
        (tmp_path / "imports" / name / "archive").write_bytes(b"")
    (tmp_path / "checkpoints").mkdir()

    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(computing, "import_adapter", fail)
    new, old = (tmp_path / "checkpoints" / name for name in ("new", "old"))
    base, bounds = None, ImportBounds(10**9, 64)
    work = ImportWork(tmp_path / "imports" / "mine" / "archive", new, old, base, bounds)  # type: ignore[arg-type]
    assert isinstance(do(work, lambda done, total: None), answer)
    assert (tmp_path / "imports" / "theirs" / "archive").is_file()
