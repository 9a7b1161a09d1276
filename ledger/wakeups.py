"""Wake-ups: announcing a topic wakes its listeners, which then read the database.

An announcement carries no data and may be lost. Every listener also reads the database by itself from time to time.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from sqlalchemy.ext.asyncio import AsyncSession

from store.database import after_commit

PLACEMENTS = "placements:"
JOBS = "jobs"
"""Topic: a job on weights is to be run. In a cluster, a message in a queue tells one worker as well."""


def trainer_topic(trainer: str) -> str:
    """Topic: runs that the trainer leases may have work ready."""
    return f"trainer:{trainer}"


def recalls_topic(trainer: str) -> str:
    """Topic: operations that the trainer may have begun were ended from outside."""
    return f"recalls:{trainer}"


def handed_over_topic(trainer: str) -> str:
    """Topic: the trainer has got a run that may have operations from long before."""
    return f"handed-over:{trainer}"


def placements_topic(base_model: str) -> str:
    """Topic: runs of a base model have work and no trainer.

    Announced inside one process only. Between processes, a message in a queue reaches a single trainer.
    """
    return f"{PLACEMENTS}{base_model}"


def sampling_topic(base_model: str) -> str:
    """Topic: samples of a base model may be ready."""
    return f"sampling:{base_model}"


def cancelled_samples_topic(base_model: str) -> str:
    """Topic: samples of a base model were ended from outside."""
    return f"cancelled:{base_model}"


def gates_topic(base_model: str) -> str:
    """Topic: gates of a base model have changed."""
    return f"gates:{base_model}"


def versions_topic(base_model: str) -> str:
    """Topic: live samplers of a base model follow other versions."""
    return f"versions:{base_model}"


def cleared_samples_topic(base_model: str) -> str:
    """Topic: samples of a base model are no longer in flight."""
    return f"departures:{base_model}"


def version_commands_topic(process: str) -> str:
    """Topic: a sampling process has a new version command."""
    return f"version-orders:{process}"


def version_command_topic(command: str) -> str:
    """Topic: a version command was carried out or has failed."""
    return f"version-order:{command}"


def unsaved_tokens_topic(request_id: str) -> str:
    """Topic: a sample goes on whose last process died; its followers may have tokens that nobody else has."""
    return f"unsaved:{request_id}"


def saved_tokens_topic(request_id: str) -> str:
    """Topic: a follower has saved the tokens that it has of a sample."""
    return f"saved:{request_id}"


def operation_topic(request_id: str) -> str:
    """Topic: the operation has finished."""
    return f"operation:{request_id}"


def shares_topic() -> str:
    """Topic: a tenant's share or class has changed."""
    return "shares"


def ended_samples_topic(lane: str) -> str:
    """Topic: samples of a lane have ended."""
    return f"ended:{lane}"


def run_steps_topic(run: str) -> str:
    """Topic: the run has taken an optimizer step."""
    return f"steps:{run}"


class Wakeups:
    """Topics and their listeners. Used from one event loop."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[asyncio.Event]] = {}
        self.is_closed = False

    @contextmanager
    def listen(self, *topics: str, event: asyncio.Event | None = None) -> Iterator[asyncio.Event]:
        """Yield an event, ``event`` if one is given, that every later announcement sets.

        Read the database once before waiting for the event.
        """
        event = event or asyncio.Event()
        for topic in topics:
            self._listeners.setdefault(topic, set()).add(event)
        try:
            yield event
        finally:
            for topic in topics:
                listeners = self._listeners[topic]
                listeners.discard(event)
                if not listeners:
                    del self._listeners[topic]

    def announce(self, topic: str) -> None:
        """Wake the listeners of ``topic``."""
        for event in self._listeners.get(topic, ()):
            event.set()

    def announce_after_commit(self, transaction: AsyncSession, topic: str) -> None:
        """Wake the listeners of ``topic`` once ``transaction`` is committed."""
        after_commit(transaction, partial(self.announce, topic))

    def topics(self) -> list[str]:
        """Return the topics that have listeners, the latest last."""
        return list(self._listeners)

    def announce_all(self) -> None:
        """Wake every listener, since announcements may have been lost."""
        for listeners in self._listeners.values():
            for event in listeners:
                event.set()

    def close(self) -> None:
        """Wake every listener for good: the process shuts down."""
        self.is_closed = True
        self.announce_all()
