"""Exceptions of clients' scripts, read from the SDK's telemetry."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.secrets import mask_secrets

MOST_OF_SESSION = 20
"""Exceptions that are kept of one session: the last ones."""
_MARK = b"UNHANDLED_EXCEPTION"
_MOST_TYPE, _MOST_MESSAGE, _MOST_TRACEBACK = 200, 2_048, 16_384
_ROOM_OF_NOTE = 48


@dataclass(frozen=True, slots=True)
class ToldException:
    """An exception as a client told it: within its bounds, without secrets, and as every database can hold it."""

    event_id: str
    error_type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class ToldExceptions:
    """The last exceptions of a session that a body of telemetry tells, oldest first."""

    session_id: str
    exceptions: list[ToldException]


def may_tell_exceptions(body: bytes) -> bool:
    """Return whether the body is worth being parsed."""
    return _MARK in body


def told_exceptions(body: bytes) -> ToldExceptions | None:
    """Return what the body tells, None for nothing. Parts of another form are left out, as the SDK's versions differ."""
    try:
        batch = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(batch, dict):
        return None
    session, events = batch.get("session_id"), batch.get("events")
    if not isinstance(session, str) or not isinstance(events, list):
        return None
    told = [one for one in events if isinstance(one, dict) and one.get("event") == _MARK.decode()]
    told = [one for one in told if isinstance(one.get("event_id"), str)][-MOST_OF_SESSION:]
    return ToldExceptions(_plain(session), [_exception(one) for one in told]) if told else None


def _exception(event: Mapping[str, Any]) -> ToldException:
    return ToldException(
        event_id=_plain(event["event_id"])[:64],
        error_type=_head(_text(event, "error_type") or "unknown", _MOST_TYPE),
        message=_head(_text(event, "error_message"), _MOST_MESSAGE),
        traceback=_tail(_text(event, "traceback"), _MOST_TRACEBACK),
    )


def _text(event: Mapping[str, Any], name: str) -> str:
    found = event.get(name)
    return mask_secrets(_plain(found)) if isinstance(found, str) else ""


def _plain(text: str) -> str:
    """Return the text with NUL and lone surrogates, which no database holds, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _head(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    kept = most - _ROOM_OF_NOTE
    return f"{text[:kept]} … {len(text) - kept} characters cut"


def _tail(text: str, most: int) -> str:
    """Return the text's end, in which a traceback names its cause."""
    if len(text) <= most:
        return text
    kept = most - _ROOM_OF_NOTE
    return f"{len(text) - kept} characters cut …\n{text[-kept:]}"
