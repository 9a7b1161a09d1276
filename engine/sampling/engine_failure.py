"""What a broken step, load or pass becomes for the requests it concerns."""

import logging

from contracts.errors import EngineFailure, WeftError

_log = logging.getLogger(__name__)


def as_weft_error(error: BaseException, action: str) -> WeftError:
    """``error`` itself if it is weft's own, else an ``EngineFailure`` that names ``action``; details go to the log."""
    if isinstance(error, WeftError):
        return error
    _log.error("%s failed", action, exc_info=error)
    return EngineFailure(f"{action} failed ({type(error).__name__})")
