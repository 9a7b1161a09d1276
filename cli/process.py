"""Setup that every process of weft shares: data folder, logs on standard error, uvloop, garbage collector."""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from cli.liveness import signs_of_life
from contracts.errors import ProcessMustEnd
from store.database import this_host
from store.private_folder import open_private_folder
from store.settings import Settings

log = logging.getLogger(__name__)

DEVICE_FAILED = 75
"""Exit status of a process whose device fails or hangs: ``EX_TEMPFAIL`` of sysexits.h. Started again, it may work."""
_YOUNG_OBJECTS, _YOUNG_ROUNDS, _MIDDLE_ROUNDS = 5_000, 10, 50
"""Thresholds of the garbage collector's three generations; Python's own are 700, 10 and 10."""
_SWITCH_SECONDS = 0.0005
"""Seconds that a busy thread keeps the interpreter from one that waits for it; Python's own are 0.005.

The event loop waits for it after each read, a pass after each call of torch, while a tenant's body is parsed or counted.
"""

_TALKATIVE = ("alembic", "celery", "kombu", "uvicorn")


def log_to_standard_error(settings: Settings, process: str) -> None:
    """Configure the logs as the settings say; talkative libraries log warnings only. ``process`` is its name in the lines."""
    from telemetry.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format, process)
    if settings.log_level != "debug":
        for talkative in _TALKATIVE:
            logging.getLogger(talkative).setLevel(logging.WARNING)


def run_process(settings: Settings, process: str, main: Callable[[Settings], Coroutine[Any, Any, None]]) -> None:
    """Run ``main`` on uvloop. Blocking. ``process`` is its name in logs. Raises what ``main`` raises.

    When ``main`` raises a ``ProcessMustEnd``, end the process at once with ``DEVICE_FAILED``: a thread that hangs in the device
    can be neither waited for nor ended.
    """
    import uvloop

    sys.setswitchinterval(_SWITCH_SECONDS)
    log_to_standard_error(settings, process)
    open_private_folder(settings.data_dir)
    from telemetry.security_file import security_files

    with (
        security_files(settings.data_dir, process, this_host()),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        try:
            runner.run(_watched(main, settings))
        except ProcessMustEnd as failure:
            log.critical("%s ends with status %d: %s", process, DEVICE_FAILED, failure)
            logging.shutdown()
            sys.stdout.flush()
            os._exit(DEVICE_FAILED)


async def _watched(main: Callable[[Settings], Coroutine[Any, Any, None]], settings: Settings) -> None:
    async with signs_of_life():
        await main(settings)


def keep_pauses_short() -> None:
    """Exempt every object that exists now from garbage collection; call it once everything is loaded.

    Loaded modules live as long as the process. A full round over the objects of an API that holds a thousand polls takes
    0.4 s of a busy core, in which no request is answered.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_ROUNDS, _MIDDLE_ROUNDS)
