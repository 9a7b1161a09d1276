"""Wait for the signals that ask a process to end: SIGINT and SIGTERM."""

import asyncio
import signal
from collections.abc import Iterable


async def until_asked_to_end(tasks: "Iterable[asyncio.Task[None]]") -> None:
    """Return at SIGINT or SIGTERM, or when one of ``tasks`` ends, which none should. Raises the task's error."""
    asked = asyncio.get_running_loop().create_future()

    def ask() -> None:
        if not asked.done():
            asked.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ask)
    done, _ = await asyncio.wait([asked, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        await task
