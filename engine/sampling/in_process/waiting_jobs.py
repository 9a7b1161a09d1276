"""Jobs of the in-process replica with sequences that have no seat in the batch yet. Owners take turns by tokens."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from engine.round_robin import Fairness
from engine.sampling.in_process.sequences import Job
from engine.sampling.seats import Seats, hand_out


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The next sequence of a job."""

    job: Job
    cost: int


class WaitingJobs:
    """Queue of each owner's jobs, the oldest first. Not thread-safe."""

    def __init__(self, max_sequences: int) -> None:
        """``max_sequences`` is how many sequences one owner alone may have in the batch."""
        self._seats = Seats.of(max_sequences)
        self._queues: dict[str, deque[Job]] = {}
        self._fairness = Fairness()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, job: Job) -> None:
        """Queue ``job``. Its owner gets the tokens back that its seats are charged and that it does not use."""
        job.on_unused = partial(self._credit, job.request.turn_taker)
        self._queues.setdefault(job.request.turn_taker, deque()).append(job)

    def seat(self, held: Counter[str], fits: Callable[[Job], bool]) -> list[Job]:
        """Give seats to sequences in fair order (``job.seated``). Return the jobs that got some, each once.

        ``held`` are the seats that each owner holds. A job whose next sequence does not fit ends the call.
        """
        for owner in list(self._queues):
            self._drop_done(owner)
        given, self._fairness = hand_out(
            {owner: _sequences(queue) for owner, queue in self._queues.items()},
            held,
            self._fairness,
            seats=self._seats,
            shares={owner: queue[0].request.share for owner, queue in self._queues.items()},
            fits=lambda sequence: fits(sequence.job),
        )
        counts = Counter(sequence.job for sequence in given)
        for job, count in counts.items():
            job.take_seats(count)
        for owner in {job.request.turn_taker for job in counts}:
            self._drop_done(owner)
        return list(counts)

    def _credit(self, owner: str, tokens: int) -> None:
        self._fairness = self._fairness.credit(owner, tokens)

    def _drop_done(self, owner: str) -> None:
        """Drop the jobs that have ended or whose sequences all have a seat."""
        queue = self._queues[owner]
        while queue and not (queue[0].live and queue[0].seatless):
            queue.popleft()
        if not queue:
            del self._queues[owner]


def _sequences(queue: deque[Job]) -> Iterator[_Sequence]:
    for job in queue:
        is_first = job.next_is_first
        for _ in range(job.seatless if job.live else 0):
            yield _Sequence(job, job.request.cost(is_first=is_first))
            is_first = False
