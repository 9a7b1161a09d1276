"""Lists of the files of a folder that surely are all of them: a folder that cannot be seen has no list."""

import os
from pathlib import Path
from typing import NoReturn


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files below ``folder`` by their names below it, in order of the names. Blocks.

    Raises ``OSError`` for a folder that cannot be read, ``FileNotFoundError`` for one that is not there or has no file:
    no folder of weft's is empty.
    """
    found = {}
    for place, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            path = Path(place, name)
            found[path.relative_to(folder).as_posix()] = path
    if not found:
        raise FileNotFoundError(folder)
    return dict(sorted(found.items()))


def _raise(error: OSError) -> NoReturn:
    raise error
