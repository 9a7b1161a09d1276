"""The data folder and the database are the service's own user's, whatever the shell's umask is."""

import os
import stat
import subprocess
import sys
from pathlib import Path

from store.private_folder import open_private_folder


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_no_other_user_can_read_what_a_command_writes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "cli.main", "tenant", "create", "cats", "--data", str(data)]
    subprocess.run(command, check=True, capture_output=True, preexec_fn=lambda: os.umask(0o022))
    assert _mode(data) == 0o700
    found = [path for path in data.rglob("*") if _mode(path) & 0o077]
    assert (data / "weft.db").exists()
    assert found == []


def test_a_folder_of_an_earlier_version_is_closed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "checkpoints").mkdir(parents=True)
    (data / "weft.db").touch()
    data.chmod(0o755)
    (data / "weft.db").chmod(0o644)
    open_private_folder(data)
    assert (_mode(data), _mode(data / "weft.db")) == (0o700, 0o600)


def test_a_folder_with_nothing_of_weft_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photographs").mkdir()
    tmp_path.chmod(0o755)
    open_private_folder(tmp_path)
    assert _mode(tmp_path) == 0o755
