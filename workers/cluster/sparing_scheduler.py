"""The scheduler of ``weft beat``: sends no further message while many wait, so that an outage of all workers leaves no heap."""

from typing import Any

from celery.beat import ScheduleEntry, Scheduler

from workers.cluster.celery_app import waiting_messages

_ROUNDS = 2
"""Messages that may wait for each entry of the schedule."""


class SparingScheduler(Scheduler):  # type: ignore[misc]  # Celery has no types
    """A scheduler in memory, without a file: a missed interval is no loss."""

    def apply_async(self, entry: ScheduleEntry, producer: Any = None, advance: bool = True, **options: Any) -> Any:
        """Send the entry's task, unless its queue is full. Raises ``SchedulingError`` without a broker."""
        if waiting_messages(self.app, entry.options["queue"]) < _ROUNDS * len(self.schedule):
            return super().apply_async(entry, producer=producer, advance=advance, **options)
        return self.reserve(entry) if advance else None
