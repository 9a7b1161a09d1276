"""Periodic loops (``repeat``) and waits for events with a time limit."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from time import monotonic

from contracts.errors import WeftError

log = logging.getLogger(__name__)

LONGEST_REST_SECONDS = 0.1
"""Longest time without a run after another one, however long that took."""


async def repeat(
    work: Callable[[], Awaitable[object]],
    *,
    seconds: Callable[[], float | None] | float,
    failed: str,
    stopping: asyncio.Event | None = None,
    wake: asyncio.Event | None = None,
    rest: float = 0.0,
) -> None:
    """Run ``work`` until ``stopping``: at once, then after each ``wake`` and at the latest ``seconds`` after the last run.

    After a run there is none for ``rest`` times as long as it took, ``LONGEST_REST_SECONDS`` at most: of very many wake-ups
    each run then answers several.
    Without ``stopping`` it runs until cancelled. ``seconds`` may be a function, called before each wait; None means no
    limit. A failure of ``work`` is logged as ``failed`` and the loop goes on: in one line when it is an expected one
    (``WeftError``, a time limit), else with its traceback. This is the one broad ``except`` of periodic work.
    """
    stopping = stopping or asyncio.Event()
    events = [stopping] if wake is None else [stopping, wake]
    while not stopping.is_set():
        if wake is not None:
            # Cleared before the work: a wake-up during the work may be about something that the work did not see.
            wake.clear()
        began = monotonic()
        try:
            await work()
        except (WeftError, TimeoutError) as failure:
            log.warning("%s: %s; trying again", failed, str(failure) or "no answer in time")
        except Exception:
            log.exception("%s; trying again", failed)
        if rest:
            await wait_for_any([stopping], min(LONGEST_REST_SECONDS, rest * (monotonic() - began)))
        await wait_for_any(events, seconds() if callable(seconds) else seconds)


async def wait_for(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for ``event`` at most ``seconds`` (None: no limit). Clear it and return whether it came.

    The event must have this one waiter: another would miss it.
    """
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


async def wait_for_any(events: Iterable[asyncio.Event], seconds: float | None) -> bool:
    """Wait for any of ``events`` at most ``seconds`` (None: no limit). Clear none of them and return whether one is set."""
    known = list(events)
    if not any(event.is_set() for event in known):
        waits = [asyncio.ensure_future(event.wait()) for event in known]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
    return any(event.is_set() for event in known)
