"""Decides, turn by turn, what runs: prompts come in between decode steps, finished sequences leave at once."""

from collections import Counter, deque
from collections.abc import Sequence

from engine.sampling.engine_failure import as_weft_error
from engine.sampling.in_process.batch import DecodeBatch, Join
from engine.sampling.in_process.forward_pass import ForwardPass
from engine.sampling.in_process.prefill import MAX_CELLS, Prefill, Prefilled
from engine.sampling.in_process.sequences import Job


class FairQueue:
    """Jobs that have not begun. Those of the adapter with the fewest running sequences go first, else oldest first."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], deque[Job]] = {}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, job: Job) -> None:
        """Queue ``job``."""
        self._jobs.setdefault(job.order, deque()).append(job)

    def peek(self, running: Counter[tuple[str, str]]) -> Job | None:
        """The job to begin next, given the running sequences of each adapter. Jobs that have ended are forgotten."""
        for order in list(self._jobs):
            waiting = self._jobs[order]
            while waiting and not waiting[0].live:
                waiting.popleft()
            if not waiting:
                del self._jobs[order]
        return self._jobs[min(self._jobs, key=lambda order: running[order])][0] if self._jobs else None

    def remove(self, job: Job) -> None:
        """Take out ``job``, which ``peek`` gave."""
        waiting = self._jobs.pop(job.order)
        waiting.popleft()
        if waiting:
            # Back at the end, so that adapters with equally many sequences take turns.
            self._jobs[job.order] = waiting


class ContinuousBatcher:
    """One model's work. Used by one thread; failures end the jobs they concern and are never raised."""

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
        """Whether ``turn`` has anything to do."""
        return bool(self._batch.rows or self._prefilled or self._prefill or self._alone or self._waiting)

    @property
    def running(self) -> int:
        """Sequences that decode now."""
        return self._batch.running

    def submit(self, job: Job) -> None:
        """Take over ``job``, whose adapter is loaded."""
        self._waiting.add(job)

    def turn(self) -> None:
        """At most one chunk of prompts and one decode step."""
        self._advance_prompts()
        joins = self._begin_samples()
        involved = {row.job for row in self._batch.rows} | {row.job for join in joins for row in join.rows}
        try:
            self._batch.reform(joins)
            if self._batch.rows:
                self._batch.step()
        except Exception as error:  # noqa: BLE001 - the step's edge: these sequences are lost, the loop goes on
            self._batch.clear()
            _fail_all(list(involved), error, "decoding")

    def _advance_prompts(self) -> None:
        if self._prefill is None and not self._prefilled:
            self._prefill = self._next_prefill()
        prefill = self._prefill
        if prefill is None or not any(job.live for job in prefill.jobs):
            self._prefill = None
            return
        try:
            prompts = prefill.advance()
        except Exception as error:  # noqa: BLE001 - the pass's edge
            self._prefill = None
            if len(prefill.jobs) == 1:
                _fail_all(prefill.jobs, error, "reading the prompt")
            else:
                # One of them may be to blame for all: each gets a pass of its own.
                self._alone.extend(prefill.jobs)
            return
        if prompts is not None:
            self._prefill = None
            self._prefilled.extend(prompts)

    def _next_prefill(self) -> Prefill | None:
        while self._alone:
            suspect = self._alone.popleft()
            if suspect.live:
                return Prefill([suspect], self._forward)
        if not self._waiting:
            return None
        chosen: list[Job] = []
        longest, room = 0, self._max_sequences - self._batch.running
        running = Counter(row.job.order for row in self._batch.rows if row.runs)
        while room > 0 and (job := self._waiting.peek(running)) is not None:
            longest = max(longest, job.prompt_length)
            if chosen and (
                longest * (len(chosen) + 1) > MAX_CELLS or (job.scores is None) != (chosen[0].scores is None)
            ):
                break
            self._waiting.remove(job)
            chosen.append(job)
            running[job.order] += job.unbegun
            room -= job.unbegun
        return Prefill(chosen, self._forward) if chosen else None

    def _begin_samples(self) -> list[Join]:
        """Start as many samples of the prefilled prompts, in order, as there is room for."""
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
            try:
                join = prompt.begin(min(room, job.unbegun))
            except Exception as error:  # noqa: BLE001 - the edge of one job's first tokens
                _fail_all([job], error, "sampling")
                continue
            joins.append(join)
            count += sum(row.runs for row in join.rows)
        return joins

    def _room(self, prompt: Prefilled, count: int, longest: int) -> int:
        """Sequences that may still start beside ``count`` others if none is longer than ``longest`` tokens."""
        tokens = self._cache_bytes // max(1, prompt.bytes_per_token)
        room = min(self._max_sequences, tokens // longest) - count
        return max(room, 1) if count == 0 else room


def _fail_all(jobs: Sequence[Job], error: Exception, action: str) -> None:
    failure = as_weft_error(error, action)
    for job in jobs:
        job.fail(failure)
