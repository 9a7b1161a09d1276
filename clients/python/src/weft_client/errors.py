"""Errors of the client: a class for each kind of HTTP status, with the ``code`` of the service's answer.

A code that the client does not know has the class of its status, so an older client tells a newer service's errors apart.
"""

from collections.abc import Mapping
from typing import Any


class WeftClientError(Exception):
    """An answer that is an error, or none at all.

    - ``code``: stable name of the error. ``status``: HTTP status, 0 without an answer.
    - ``retryable``: whether the same request may succeed later.
    - ``retry_after``: seconds to wait first, as far as the service said.
    """

    def __init__(
        self, detail: str, *, code: str, status: int, retryable: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{detail} ({code})")
        self.detail = detail
        self.code = code
        self.status = status
        self.retryable = retryable
        self.retry_after = retry_after


class NotAuthenticated(WeftClientError):
    """No key, or one that is unknown, expired or revoked."""


class NotAllowed(WeftClientError):
    """The key lacks a scope, or the tenant is suspended."""


class NotThere(WeftClientError):
    """Nothing of that id that the key reaches."""


class BadRequest(WeftClientError):
    """The request cannot be carried out as it is; ``detail`` says what to change."""


class BudgetSpent(WeftClientError):
    """A budget is spent; the request may be sent again once it is raised, or its period has ended."""


class OverLimit(WeftClientError):
    """A limit of the tenant is reached; the request may be sent again later."""


class EditConflict(WeftClientError):
    """The state has changed since it was read; nothing was done. Read it again, and decide anew."""


class ServiceUnavailable(WeftClientError):
    """The service, or the way to it, is down; whether the request took effect is not known."""


class OutcomeUnknown(ServiceUnavailable):
    """The answer of a change was lost, and the change cannot be sent twice. Read the state to learn whether it was made."""


_BY_STATUS: Mapping[int, type[WeftClientError]] = {
    400: BadRequest,
    401: NotAuthenticated,
    402: BudgetSpent,
    403: NotAllowed,
    404: NotThere,
    410: NotThere,
    412: EditConflict,
    413: BadRequest,
    422: BadRequest,
    429: OverLimit,
}


def error_of(status: int, body: Any, retry_after: str | None) -> WeftClientError:
    """Return the error of an answer; ``body`` is its JSON, None where it has none."""
    told = body if isinstance(body, dict) else {}
    kind = _BY_STATUS.get(status, ServiceUnavailable if status >= 500 else WeftClientError)
    return kind(
        str(told.get("detail") or f"the service answered {status}"),
        code=str(told.get("code") or f"http_{status}"),
        status=status,
        retryable=bool(told.get("retryable", status in (408, 429) or status >= 500)),
        retry_after=float(retry_after) if retry_after is not None and retry_after.isdigit() else None,
    )
