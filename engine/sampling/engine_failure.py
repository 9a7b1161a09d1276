"""Turns an unexpected exception of a step, a load or a prefill into the ``EngineFailure`` that its requests get."""

import logging

from contracts.errors import EngineFailure, WeftError

_log = logging.getLogger(__name__)


def as_weft_error(error: BaseException, action: str) -> WeftError:
    """Return ``error`` if it is a ``WeftError``, else an ``EngineFailure`` that names ``action`` and the error's type.

    The details go to the log only: they may hold paths.
    """
    if isinstance(error, WeftError):
        return error
    _log.error("%s failed", action, exc_info=error)
    return EngineFailure(f"{action} failed ({type(error).__name__})")
