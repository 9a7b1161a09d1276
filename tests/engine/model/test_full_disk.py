"""A disk that takes no more is an ``OSError``, whichever library writes."""

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from safetensors import SafetensorError

from engine.model.atomic_folder import write_atomically

PROGRAM = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from engine.model.atomic_folder import write_atomically

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
folder = Path(sys.argv[1])
try:
    write_atomically(folder, lambda staging: save_file({"a": np.zeros(10_000, np.float32)}, staging / "a.safetensors"))
except OSError as error:
    print(error.errno, [one.name for one in folder.parent.iterdir()])
"""


def test_a_file_that_safetensors_cannot_write_is_an_error_of_the_disk_and_leaves_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "adapter")], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "27 []\n", ended.stderr[-1000:]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Error while serializing: I/O error: No space left on device (os error 28)", 28),
        ('Error while serializing: I/O error: No such file or directory (os error 2) at path "/data/.tmpA"', 2),
        ("Error while serializing: invalid offset for tensor `a (os error 28)`", None),
    ],
)
def test_only_the_end_of_what_safetensors_says_tells_of_the_disk(tmp_path: Path, text: str, number: int | None) -> None:
    """Names of tensors may stand before the end."""

    def fail(_: Path) -> NoReturn:
        raise SafetensorError(text)

    with pytest.raises(SafetensorError if number is None else OSError) as failed:
        write_atomically(tmp_path / "adapter", fail)
    assert getattr(failed.value, "errno", None) == number
    assert list(tmp_path.iterdir()) == []
