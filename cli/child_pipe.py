"""A pipe from a supervised process to its supervisor."""

import os


class ChildPipe:
    """Both ends of a pipe, of which the child inherits the one for ``writing``."""

    def __init__(self) -> None:
        """Raise ``OSError`` when no more files can be open."""
        self._reading, self.writing = os.pipe()

    def started(self) -> None:
        """Close the child's end here, which the child has by now."""
        if self.writing >= 0:
            os.close(self.writing)
        self.writing = -1

    def close(self) -> None:
        """Close the pipe."""
        self.started()
        if self._reading >= 0:
            os.close(self._reading)
        self._reading = -1
