"""Scheduler of the in-process replica: runs chunks of prompts between decode steps, and drops ended sequences at once."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from engine.model.device import device_errors
from engine.sampling.engine_failure import as_weft_error
from engine.sampling.in_process.batch import DecodeBatch, Join
from engine.sampling.in_process.forward_pass import ForwardPass
from engine.sampling.in_process.prefill import MAX_CELLS, Prefill, Prefilled
from engine.sampling.in_process.sequences import Job
from engine.sampling.in_process.waiting_jobs import WaitingJobs

T = TypeVar("T")


class ContinuousBatcher:
    """All sampling work on one model. Not thread-safe. A failure ends the jobs it concerns and is not raised, except
    for ``DeviceFailed``.

    One owner alone has at most ``max_sequences`` in the batch. An eighth more is kept for owners that come beside it.
    """

    def __init__(self, forward: ForwardPass, max_sequences: int, cache_bytes: int) -> None:
        self._forward = forward
        self._cache_bytes = cache_bytes
        self._bytes_per_token: int | None = None
        """Cache memory of one token in bytes; None before the first prompt."""
        self._waiting = WaitingJobs(max_sequences)
        self._prefills: deque[Prefill] = deque()
        """Prompts under way. They take turns, a chunk each, so that a short prompt does not wait for a long one."""
        self._prefilled: dict[Job, Prefilled] = {}
        """Prompts in the cache whose sequences have not all begun."""
        self._batch = DecodeBatch(forward)
        self.failed_steps = 0
        """Steps that failed for all their jobs."""

    @property
    def busy(self) -> bool:
        """True while ``turn`` has work."""
        return bool(self._batch.sequences or self._prefilled or self._prefills or self._waiting)

    @property
    def running(self) -> int:
        """Number of sequences that decode now."""
        return self._batch.running

    def submit(self, job: Job) -> None:
        """Queue ``job``, whose adapter is loaded."""
        self._waiting.add(job)

    def turn(self) -> None:
        """Run at most one chunk of prompts and one decode step."""
        self._credit_ended()
        if self._waiting:
            self._seat()
        self._advance_prompts()
        joins = self._begin_samples()
        jobs = {one.job for one in self._batch.sequences} | {one.job for join in joins for one in join.sequences}
        _contain(partial(self._decode, joins), partial(self._decoding_failed, list(jobs)))

    def _decode(self, joins: Sequence[Join]) -> None:
        self._batch.reform(joins)
        if self._batch.sequences:
            self._batch.step()

    def _decoding_failed(self, jobs: Sequence[Job], error: Exception) -> None:
        self.failed_steps += 1
        self._batch.clear()
        _fail_all("decoding", jobs, error)

    def _credit_ended(self) -> None:
        """Credit what ended sequences did not draw. The batch drops them before its next step."""
        for sequence in self._batch.sequences:
            if not sequence.runs:
                self._waiting.ended(sequence)

    def _seat(self) -> None:
        """Give free seats to waiting sequences, and begin the prompts that are not in the cache yet."""
        running = [one.job for one in self._batch.sequences if one.runs]
        starting = {job for prefill in self._prefills for job in prefill.jobs} | self._prefilled.keys()
        held = Counter(job.request.turn_taker for job in running)
        for job in starting:
            held[job.request.turn_taker] += job.seated
        count = held.total()
        longest = max((job.final_length for job in (*running, *(job for job in starting if job.live))), default=0)

        def fits(job: Job) -> bool:
            nonlocal count, longest
            longest_with = max(longest, job.final_length)
            if count and (count + 1) * longest_with > self._columns():
                return False
            count, longest = count + 1, longest_with
            return True

        fresh = [job for job in self._waiting.seat(held, fits) if job not in starting]
        # In front: the prompts that came last have their first chunk first.
        self._prefills.extendleft(reversed(self._new_prefills(fresh)))

    def _columns(self) -> int:
        """Return how many tokens the cache may hold: one sequence's, until the first prompt has shown a token's size."""
        return 0 if self._bytes_per_token is None else self._cache_bytes // max(1, self._bytes_per_token)

    def _new_prefills(self, jobs: Sequence[Job]) -> list[Prefill]:
        """Put the prompts of ``jobs`` together in blocks of at most ``MAX_CELLS``, or one longer prompt alone."""
        blocks: list[list[Job]] = []
        longest = 0
        for job in jobs:
            longest = max(longest, job.prompt_length)
            is_alike = bool(blocks) and (job.scores is None) == (blocks[-1][0].scores is None)
            if is_alike and longest * (len(blocks[-1]) + 1) <= MAX_CELLS:
                blocks[-1].append(job)
            else:
                blocks.append([job])
                longest = job.prompt_length
        return [Prefill(block, self._forward) for block in blocks]

    def _advance_prompts(self) -> None:
        """Run one chunk of the prompts whose turn it is."""
        while self._prefills:
            prefill = self._prefills.popleft()
            if not any(job.live for job in prefill.jobs):
                continue
            self._prefills.append(prefill)
            chunk = partial(prefill.advance, beside_decoding=bool(self._batch.running))
            prompts = _contain(chunk, partial(self._prefill_failed, prefill))
            if prompts is not None:
                self._prefills.remove(prefill)
                self._prefilled.update((prompt.job, prompt) for prompt in prompts)
            return

    def _prefill_failed(self, prefill: Prefill, error: Exception) -> None:
        self._prefills.remove(prefill)
        if len(prefill.jobs) == 1:
            self.failed_steps += 1
            _fail_all("reading the prompt", prefill.jobs, error)
        else:
            # One job may be the cause. Each gets a prefill of its own, so that only that one fails.
            self._prefills.extend(Prefill([job], self._forward) for job in prefill.jobs if job.live)

    def _begin_samples(self) -> list[Join]:
        """Start the sequences that have a seat and whose prompt is in the cache."""
        joins: list[Join] = []
        for job, prompt in list(self._prefilled.items()):
            self._bytes_per_token = prompt.bytes_per_token
            if job.seated:
                join = _contain(prompt.begin, partial(_fail_all, "sampling", [job]))
                if join is not None:
                    joins.append(join)
                    for sequence in join.sequences:
                        if not sequence.runs:
                            self._waiting.ended(sequence)
            if not job.live or not job.unbegun:
                del self._prefilled[job]
            else:
                prompt.detach()
        return joins


def _contain(work: Callable[[], T], failed: Callable[[Exception], None]) -> T | None:
    """Return the result of ``work``; hand any error that it raises to ``failed`` and return None. Raises ``DeviceFailed``."""
    try:
        with device_errors():
            return work()
    except Exception as error:  # noqa: BLE001 - the edge of one step: only its jobs fail, the loop goes on
        failed(error)
        return None


def _fail_all(action: str, jobs: Sequence[Job], error: Exception) -> None:
    failure = as_weft_error(error, action)
    for job in jobs:
        job.fail(failure)
