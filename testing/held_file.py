"""A file whose disk does not answer, for tests of who waits for it."""

import os
import threading
from pathlib import Path

PATIENCE_SECONDS = 600.0


class HeldFile:
    """``file`` as a pipe: whoever reads it waits until it is mended."""

    def __init__(self, file: Path) -> None:
        """Hold readers from now on."""
        self._file, self._whole = file, file.rename(file.with_name(f"{file.name}.whole"))
        self._writer: int | None = None
        os.mkfifo(file)

    def reached(self) -> None:
        """Wait until somebody reads. Blocking. Raises ``TimeoutError``."""
        late = threading.Event()

        def let_go() -> None:
            late.set()
            os.close(os.open(self._file, os.O_RDONLY | os.O_NONBLOCK))

        timer = threading.Timer(PATIENCE_SECONDS, let_go)
        timer.start()
        # The earlier one is closed after that: between the two a reader would find the file's end.
        writer = os.open(self._file, os.O_WRONLY)
        timer.cancel()
        self._let_go()
        self._writer = writer
        if late.is_set():
            raise TimeoutError(f"nobody reads {self._file}")

    def mend(self) -> None:
        """Let whoever reads from now on have the file. Whoever waits gets none of it."""
        self._whole.rename(self._file)
        self._let_go()

    def _let_go(self) -> None:
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None
