"""Sending of calls, with and without asyncio: retries of what may be repeated, errors as classes."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from weft_client.call import Call
from weft_client.errors import OutcomeUnknown, ServiceUnavailable, WeftClientError, error_of
from weft_client.modules import Later

if TYPE_CHECKING:
    import httpx

    from weft_client.models import Record
else:
    httpx = Later("httpx")

DEFAULT_TIMEOUT = 30.0
DEFAULT_RETRIES = 5
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 20.0
"""Seconds before a repeat, which double each time."""
_UNKNOWN = frozenset({0, 500, 502, 503, 504})
"""Statuses after which a change may have been made; 0: no answer."""
_NOT_SENT = "no_connection"
"""Code of a request that never reached the service."""
_CREDENTIALS = Path("~/.tinker/credentials.json")
"""File of the ``tinker auth login`` command."""

R = TypeVar("R", bound="Record")


class Endpoint:
    """Address and key of a service, and how often a request is repeated."""

    def __init__(self, base_url: str, api_key: str, timeout: float, retries: int) -> None:
        self.base_url = base_url.rstrip("/")
        self.headers = {"X-API-Key": api_key}
        self.timeout = timeout
        self.retries = retries

    @classmethod
    def of_tenant(cls, base_url: str | None, api_key: str | None, timeout: float, retries: int) -> Self:
        """Return the endpoint of a tenant's key.

        ``base_url`` and ``api_key`` default to ``TINKER_BASE_URL`` and ``TINKER_API_KEY``; the key also to the one that
        ``tinker auth login`` has stored. Raises ``ValueError`` where neither is there.
        """
        url = base_url or os.environ.get("TINKER_BASE_URL")
        key = api_key or os.environ.get("TINKER_API_KEY") or _stored_key()
        if not url:
            raise ValueError("name the service: pass base_url, or set TINKER_BASE_URL")
        if not key:
            raise ValueError("no API key: pass api_key, set TINKER_API_KEY, or run `tinker auth login`")
        return cls(url, key, timeout, retries)

    @classmethod
    def of_operator(cls, base_url: str | None, api_key: str | None, timeout: float, retries: int) -> Self:
        """Return the endpoint of an operator's key.

        ``base_url`` and ``api_key`` default to ``WEFT_ADMIN_URL`` and ``WEFT_ADMIN_KEY``. Raises ``ValueError`` where neither
        is there.
        """
        url = base_url or os.environ.get("WEFT_ADMIN_URL")
        key = api_key or os.environ.get("WEFT_ADMIN_KEY")
        if not url:
            raise ValueError("name the admin API: pass base_url, or set WEFT_ADMIN_URL")
        if not key:
            raise ValueError(
                "no operator's key: pass api_key, or set WEFT_ADMIN_KEY (`weft operator create` makes one)"
            )
        return cls(url, key, timeout, retries)

    def request(self, call: Call[Any]) -> dict[str, Any]:
        """Return the arguments of ``httpx`` for the call."""
        seconds = self.timeout + (call.seconds or 0.0)
        return {
            "method": call.method,
            "url": self.base_url + call.path,
            "params": dict(call.query),
            "json": call.body,
            "content": call.content,
            "headers": {**self.headers, **call.headers},
            "timeout": seconds,
        }

    def delay(self, call: Call[Any], failure: WeftClientError, attempt: int) -> float:
        """Return the seconds before the call is sent again. Raises ``failure`` if it is not to be."""
        if not call.is_safe_twice and failure.status in _UNKNOWN and failure.code != _NOT_SENT:
            told = (
                f"whether the change was made is not known ({failure.detail}); read the state before you send it again"
            )
            raise OutcomeUnknown(told, code="outcome_unknown", status=failure.status) from failure
        if attempt >= self.retries or not failure.retryable or not call.is_repeatable:
            raise failure
        if failure.retry_after is not None:
            return failure.retry_after
        longest = min(_FIRST_DELAY * 2**attempt, _LONGEST_DELAY)
        return random.uniform(longest / 2, longest)


def read(call: Call[R], response: httpx.Response) -> R | None:
    """Return the answer as the call's record. Raises ``WeftClientError``."""
    if response.is_success:
        try:
            return None if call.answer is None else call.answer.model_validate_json(response.content)
        except ValueError as error:
            told = f"the answer is no {call.answer.__name__ if call.answer else 'answer'} of weft's"
            raise WeftClientError(told, code="bad_answer", status=response.status_code) from error
    try:
        body = response.json()
    except ValueError:
        body = None
    raise error_of(response.status_code, body, response.headers.get("Retry-After"))


def unreachable(error: httpx.TransportError) -> ServiceUnavailable:
    """Return the error of a request without an answer."""
    told = f"{type(error).__name__}: {error}"
    code = _NOT_SENT if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else "no_answer"
    return ServiceUnavailable(f"the service did not answer: {told}", code=code, status=0, retryable=True)


def _stored_key() -> str | None:
    try:
        stored = json.loads(_CREDENTIALS.expanduser().read_text())
        key = stored["keys"][stored["default"]]["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return key if isinstance(key, str) else None
