"""The security log: who was refused, who got or lost a key, who fetched weights, what operators did.

Every event is one record of the logger ``weft.security``, with the same fields in both log formats. Floods are sampled: an
attacker must not be able to fill a disk. A record never holds a secret: of a key it has the public first part.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from time import monotonic
from typing import Literal

from telemetry.context import current_work

LOGGER = "weft.security"
log = logging.getLogger(LOGGER)

_WINDOW_SECONDS = 60.0
_MOST_OF_A_SOURCE = 5
"""Records of one source and event in a window; further ones are counted."""
_MOST_OF_ALL = 300
"""Sampled records of one process in a window, whatever their sources."""


class SecurityEvent(StrEnum):
    """Kind of an event. ``docs/reference/security-log.md`` describes each."""

    KEY_REFUSED = "key_refused"
    NOT_FOUND = "not_found"
    FOREIGN_ID = "foreign_id"
    FORBIDDEN = "forbidden"
    POLICY_VIOLATED = "policy_violated"
    KEY_CREATED = "key_created"
    KEY_REVOKED = "key_revoked"
    TENANT_CREATED = "tenant_created"
    TENANT_SUSPENDED = "tenant_suspended"
    TENANT_RESUMED = "tenant_resumed"
    TENANT_MARKED = "tenant_marked_for_deletion"
    TENANT_RESTORED = "tenant_restored"
    LINK_MADE = "download_link_made"
    DOWNLOADED = "downloaded"
    COMMAND = "operator_command"
    AUDIT_DIGEST = "audit_digest"


Outcome = Literal["done", "refused", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityRecord:
    """One event.

    - ``actor``: key by its public first part, or an operator's user and host.
    - ``source``: address that a request came from.
    - ``resource``: what the event is about; ``detail``: anything else, without secrets.
    - ``unwritten``: earlier records like this one that the sampling left out.
    """

    event: SecurityEvent
    outcome: Outcome
    actor: str | None = None
    tenant: str | None = None
    source: str | None = None
    resource: str | None = None
    detail: str | None = None
    unwritten: int = 0

    def named(self) -> dict[str, str | int]:
        """Return the fields that are set, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value not in (None, 0)}


def note(record: SecurityRecord) -> None:
    """Write a record. Its fields are in the line's text, and in the JSON format also an object ``security``."""
    named = record.named()
    if (trace_id := current_work().trace_id) is not None:
        named["trace_id"] = trace_id
    text = " ".join(f"{name}={_word(value)}" for name, value in named.items())
    log.info("%s", text, extra={"security": named})


def _word(value: str | int) -> str:
    """Return a value as one word or a quoted text, with nothing that could begin a line of its own."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and not set(text) & set(' "=') else ascii(text)


class SampledRecords:
    """Writes records that anybody can cause, a few of each source and minute. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """``clock`` gives seconds from any start."""
        self._clock = clock
        self._begun = float("-inf")
        self._written: Counter[tuple[SecurityEvent, str]] = Counter()
        self._unwritten: Counter[SecurityEvent] = Counter()

    def note(self, record: SecurityRecord) -> None:
        """Write the record, or count it if its source or the process has written its share of this minute."""
        if self._clock() - self._begun >= _WINDOW_SECONDS:
            self._begin_window()
        key = (record.event, record.source or record.tenant or "")
        if self._written[key] >= _MOST_OF_A_SOURCE or self._written.total() >= _MOST_OF_ALL:
            self._unwritten[record.event] += 1
            return
        self._written[key] += 1
        note(record)

    def _begin_window(self) -> None:
        """Tell of each event how many records the last window left out, and begin the next one."""
        for event, count in self._unwritten.items():
            note(SecurityRecord(event=event, outcome="refused", unwritten=count))
        self._unwritten.clear()
        self._written.clear()
        self._begun = self._clock()
