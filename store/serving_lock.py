"""A data folder's lock, which ``weft serve`` holds as long as it runs.

``weft serve`` keeps wake-ups and the versions that its sampler reads in its own process. A second one beside it, on the same
folder, would take runs whose requests it is never told of, and remove versions that the first one samples.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contracts.errors import InvalidRequest

_LOCK = "serve.lock"


@contextmanager
def serving_alone(root: Path) -> Iterator[None]:
    """Hold the data folder inside the block; its lock ends with the process, however that ends. Raises ``InvalidRequest``."""
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.read(descriptor, 20).decode(errors="replace").strip()
            raise InvalidRequest(
                f"another `weft serve` (pid {pid}) has this data folder; stop it, or choose another folder with --data. "
                "Several processes on one folder are a cluster: `weft up`"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)
