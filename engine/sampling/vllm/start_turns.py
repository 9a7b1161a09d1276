"""Turns of this process's vLLM servers to start on a GPU: one after another, each once the one before is up or has failed.

A server that starts has a part of its memory, and nobody can tell how much of what is gone from its GPU is that part.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_starting: dict[str, asyncio.Event] = {}
"""GPUs on which a server starts, by UUID; the event is set when it has."""


def is_someones_turn(gpus: Sequence[str]) -> bool:
    """Tell whether a server starts on one of the GPUs now."""
    return any(gpu in _starting for gpu in gpus)


@contextmanager
def turn(gpus: Sequence[str]) -> Iterator[None]:
    """Keep others from starting on the GPUs meanwhile. Enter it only while it is nobody's turn there."""
    ended = asyncio.Event()
    _starting.update(dict.fromkeys(gpus, ended))
    try:
        yield
    finally:
        for gpu in gpus:
            del _starting[gpu]
        ended.set()


async def end_of_turn(gpus: Sequence[str]) -> None:
    """Wait until each server that starts on the GPUs now is up or has failed."""
    for event in [_starting[gpu] for gpu in gpus if gpu in _starting]:
        await event.wait()
