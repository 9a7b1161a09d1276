"""Wake-ups: a topic is announced, whoever listens is woken. They carry no truth, only a hint to look."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

PLACEMENTS = "placements:"


def trainer_topic(trainer: str) -> str:
    """Work of runs that the trainer has may be ready."""
    return f"trainer:{trainer}"


def placements_topic(base_model: str) -> str:
    """Runs of a base model have work and no trainer. Told inside one process; between processes a queue tells one of them."""
    return f"{PLACEMENTS}{base_model}"


def sampling_topic(base_model: str) -> str:
    """Sampling work for a base model may be ready."""
    return f"sampling:{base_model}"


def gates_topic(base_model: str) -> str:
    """Gates have changed."""
    return f"gates:{base_model}"


def versions_topic(base_model: str) -> str:
    """Live samplers follow other versions."""
    return f"versions:{base_model}"


def departures_topic(base_model: str) -> str:
    """Samples are no longer in flight."""
    return f"departures:{base_model}"


def version_commands_topic(process: str) -> str:
    """A sampling process is asked to load or forget versions."""
    return f"version-orders:{process}"


def version_command_topic(order: str) -> str:
    """An order is carried out, or could not be."""
    return f"version-order:{order}"


def operation_topic(request_id: str) -> str:
    """The operation has finished."""
    return f"operation:{request_id}"


class Wakeups:
    """Topics and their listeners, all of one event loop."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[asyncio.Event]] = {}
        self.is_closed = False

    @contextmanager
    def listen(self, *topics: str) -> Iterator[asyncio.Event]:
        """An event that is set by every announcement from now on; look at the truth once before waiting for it."""
        event = asyncio.Event()
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

    def topics(self) -> list[str]:
        """Those that somebody listens to, the latest last."""
        return list(self._listeners)

    def announce_all(self) -> None:
        """Wake every listener: something may have been missed."""
        for listeners in self._listeners.values():
            for event in listeners:
                event.set()

    def close(self) -> None:
        """At shutdown nobody should be held."""
        self.is_closed = True
        self.announce_all()
