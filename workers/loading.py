"""Loading of large libraries: torch, transformers, FastAPI."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Leave garbage collection out while modules are imported, and exempt from it what they have made.

    Modules live as long as their process. Rounds over their ever more objects are a good part of an import's time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
