"""How a process of weft runs: logs on standard error, uvloop, and the data folder there."""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from store.settings import Settings

_YOUNG_OBJECTS, _YOUNG_ROUNDS, _MIDDLE_ROUNDS = 5_000, 10, 50
"""When the collector looks at what is new, at what survived that, and at everything; Python's own are 700, 10 and 10."""

_TALKATIVE = ("alembic", "celery", "kombu", "uvicorn")


def log_to_standard_error(settings: Settings, process: str) -> None:
    """As the settings say; libraries that talk much are heard when they warn. ``process`` is what the lines call it."""
    from telemetry.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format, process)
    if settings.log_level != "debug":
        for talkative in _TALKATIVE:
            logging.getLogger(talkative).setLevel(logging.WARNING)


def run_process(settings: Settings, process: str, main: Callable[[Settings], Coroutine[Any, Any, None]]) -> None:
    """Blocking. ``process`` is what its logs call it. Raises what ``main`` raises."""
    import uvloop

    settings.data_dir.mkdir(parents=True, exist_ok=True)
    log_to_standard_error(settings, process)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(settings))


def keep_pauses_short() -> None:
    """Call it once everything is loaded: the garbage collector then leaves that alone.

    A full round over the modules of an API that holds a thousand polls takes 0.4 s of a busy core, and nothing is
    answered meanwhile. What is loaded lives as long as the process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_ROUNDS, _MIDDLE_ROUNDS)
