"""Scheduler of the in-process replica: runs chunks of prompts between decode steps, and drops ended sequences at once."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from engine.sampling.engine_failure import as_weft_error
from engine.sampling.in_process.batch import DecodeBatch, Join
from engine.sampling.in_process.forward_pass import ForwardPass
from engine.sampling.in_process.prefill import MAX_CELLS, Prefill, Prefilled
from engine.sampling.in_process.sequences import Job

T = TypeVar("T")


class FairQueue:
    """Jobs that have not begun. The adapter with the fewest running sequences goes first; within an adapter, the oldest job."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], deque[Job]] = {}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, job: Job) -> None:
        """Queue ``job``."""
        self._jobs.setdefault(job.adapter_key, deque()).append(job)

    def peek(self, running: Counter[tuple[str, str]]) -> Job | None:
        """Return the job to begin next, given each adapter's number of running sequences; None when the queue is empty.

        Drops ended jobs from the queue.
        """
        for key in list(self._jobs):
            waiting = self._jobs[key]
            while waiting and not waiting[0].live:
                waiting.popleft()
            if not waiting:
                del self._jobs[key]
        return self._jobs[min(self._jobs, key=lambda key: running[key])][0] if self._jobs else None

    def remove(self, job: Job) -> None:
        """Remove ``job``, which ``peek`` has just returned."""
        waiting = self._jobs.pop(job.adapter_key)
        waiting.popleft()
        if waiting:
            # The adapter goes to the end, so that adapters with equally many running sequences take turns.
            self._jobs[job.adapter_key] = waiting


class ContinuousBatcher:
    """All sampling work on one model. Not thread-safe. A failure ends the jobs it concerns and is never raised."""

    def __init__(self, forward: ForwardPass, max_sequences: int, cache_bytes: int) -> None:
        self._forward = forward
        self._max_sequences = max_sequences
        self._cache_bytes = cache_bytes
        self._waiting = FairQueue()
        self._alone: deque[Job] = deque()
        self._prefill: Prefill | None = None
        self._prefilled: deque[Prefilled] = deque()
        self._batch = DecodeBatch(forward)

    @property
    def busy(self) -> bool:
        """True while ``turn`` has work."""
        return bool(self._batch.sequences or self._prefilled or self._prefill or self._alone or self._waiting)

    @property
    def running(self) -> int:
        """Number of sequences that decode now."""
        return self._batch.running

    def submit(self, job: Job) -> None:
        """Queue ``job``, whose adapter is loaded."""
        self._waiting.add(job)

    def turn(self) -> None:
        """Run at most one chunk of prompts and one decode step."""
        self._advance_prompts()
        joins = self._begin_samples()
        jobs = {one.job for one in self._batch.sequences} | {one.job for join in joins for one in join.sequences}
        _contain(partial(self._decode, joins), partial(self._decoding_failed, list(jobs)))

    def _decode(self, joins: Sequence[Join]) -> None:
        self._batch.reform(joins)
        if self._batch.sequences:
            self._batch.step()

    def _decoding_failed(self, jobs: Sequence[Job], error: Exception) -> None:
        self._batch.clear()
        _fail_all("decoding", jobs, error)

    def _advance_prompts(self) -> None:
        if self._prefill is None and not self._prefilled:
            self._prefill = self._next_prefill()
        prefill = self._prefill
        if prefill is None or not any(job.live for job in prefill.jobs):
            self._prefill = None
            return
        prompts = _contain(prefill.advance, partial(self._prefill_failed, prefill.jobs))
        if prompts is not None:
            self._prefill = None
            self._prefilled.extend(prompts)

    def _prefill_failed(self, jobs: Sequence[Job], error: Exception) -> None:
        self._prefill = None
        if len(jobs) == 1:
            _fail_all("reading the prompt", jobs, error)
        else:
            # One job may be the cause. Each gets a prefill of its own, so that only that one fails.
            self._alone.extend(jobs)

    def _next_prefill(self) -> Prefill | None:
        while self._alone:
            suspect = self._alone.popleft()
            if suspect.live:
                return Prefill([suspect], self._forward)
        if not self._waiting:
            return None
        chosen: list[Job] = []
        longest, room = 0, self._max_sequences - self._batch.running
        running = Counter(one.job.adapter_key for one in self._batch.sequences if one.runs)
        while room > 0 and (job := self._waiting.peek(running)) is not None:
            longest = max(longest, job.prompt_length)
            if chosen and (
                longest * (len(chosen) + 1) > MAX_CELLS or (job.scores is None) != (chosen[0].scores is None)
            ):
                break
            self._waiting.remove(job)
            chosen.append(job)
            running[job.adapter_key] += job.unbegun
            room -= job.unbegun
        return Prefill(chosen, self._forward) if chosen else None

    def _begin_samples(self) -> list[Join]:
        """Start as many sequences of the prefilled prompts, in order, as there is room for."""
        joins: list[Join] = []
        count, longest = self._batch.running, self._batch.final_length
        while self._prefilled:
            prompt = self._prefilled[0]
            job = prompt.job
            if not job.live or not job.unbegun:
                self._prefilled.popleft()
                continue
            longest = max(longest, job.final_length)
            room = self._room(prompt, count, longest)
            if room <= 0:
                for waiting in self._prefilled:
                    waiting.detach()
                break
            join = _contain(partial(prompt.begin, min(room, job.unbegun)), partial(_fail_all, "sampling", [job]))
            if join is not None:
                joins.append(join)
                count += sum(sequence.runs for sequence in join.sequences)
        return joins

    def _room(self, prompt: Prefilled, count: int, longest: int) -> int:
        """Return how many sequences may start beside ``count`` others if none grows beyond ``longest`` tokens."""
        tokens = self._cache_bytes // max(1, prompt.bytes_per_token)
        room = min(self._max_sequences, tokens // longest) - count
        return max(room, 1) if count == 0 else room


def _contain(work: Callable[[], T], failed: Callable[[Exception], None]) -> T | None:
    """Return the result of ``work``; hand any error that it raises to ``failed`` and return None."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - the edge of one step: only its jobs fail, the loop goes on
        failed(error)
        return None


def _fail_all(action: str, jobs: Sequence[Job], error: Exception) -> None:
    failure = as_weft_error(error, action)
    for job in jobs:
        job.fail(failure)
