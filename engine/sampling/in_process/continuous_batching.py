"""Scheduler of the in-process replica: runs chunks of prompts between decode steps, and drops ended sequences at once."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import TypeVar

from engine.model.device import device_errors
from engine.piece_size import PieceSize
from engine.sampling.engine_failure import as_weft_error
from engine.sampling.in_process.batch import DecodeBatch, Join
from engine.sampling.in_process.forward_pass import ForwardPass
from engine.sampling.in_process.prefill import CELLS_BESIDE_DECODING, MAX_CELLS, Prefill, Prefilled
from engine.sampling.in_process.sequences import Job, RunningSequence
from engine.sampling.in_process.time_turns import Division, Group, TimeTurns
from engine.sampling.in_process.waiting_jobs import WaitingJobs

T = TypeVar("T")


class ContinuousBatcher:
    """All sampling work on one model. Not thread-safe. A failure ends the jobs it concerns and is not raised, except
    for ``DeviceFailed``.

    One owner alone has at most ``max_sequences`` in the batch. An eighth more is kept for owners that come beside it.
    """

    def __init__(
        self,
        forward: ForwardPass,
        max_sequences: int,
        cache_bytes: int,
        *,
        piece_seconds: float,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """``piece_seconds`` is the time that a chunk of prompts should take while several owners have work."""
        self._forward = forward
        self._cache_bytes = cache_bytes
        self._clock = clock
        self._size = PieceSize(piece_seconds, clock=clock)
        self._bytes_per_token: int | None = None
        """Cache memory of one token in bytes; None before the first prompt."""
        self._waiting = WaitingJobs(max_sequences)
        self._prefills: deque[Prefill] = deque()
        """Prompts under way. They take turns, a chunk each, so that a short prompt does not wait for a long one."""
        self._prefilled: dict[Job, Prefilled] = {}
        """Prompts in the cache whose sequences have not all begun."""
        self._division = Division(divides=forward.device.type == "cpu")
        self._turns = TimeTurns()
        self._batches = {group: DecodeBatch(forward) for group in Group}
        self.failed_steps = 0
        """Steps that failed for all their jobs."""

    @property
    def busy(self) -> bool:
        """True while ``turn`` has work."""
        decodes = any(batch.sequences for batch in self._batches.values())
        return bool(decodes or self._prefilled or self._prefills or self._waiting)

    @property
    def running(self) -> int:
        """Number of sequences that decode now."""
        return sum(batch.running for batch in self._batches.values())

    def submit(self, job: Job) -> None:
        """Queue ``job``, whose adapter is loaded."""
        self._size.meet([job.request.turn_taker])
        self._waiting.add(job)

    def turn(self) -> None:
        """Run at most one chunk of prompts and one decode step, both of the group whose turn it is."""
        began = self._clock()
        self._drop_ended_prompts()
        if self._waiting:
            self._seat()
        held = self._held()
        self._size.meet(owner for owner, number in held.items() if number)
        is_divided_anew = self._division.renew(held)
        shares = self._shares()
        group = self._turns.choose(shares)
        if group is not None:
            self._advance_prompts(group)
        joins = {one: self._moving_to(one) if is_divided_anew else [] for one in Group}
        for join in self._begin_samples():
            joins[self._group(join.sequences[0].job)].append(join)
        for one, batch in self._batches.items():
            self._decode(batch, joins[one], steps=one is group)
        if group is not None:
            self._turns.charge(group, self._clock() - began, shares)

    def _moving_to(self, group: Group) -> list[Join]:
        """Return the sequences that decode in another batch than that of their owner's group ``group``."""
        batches = [batch for one, batch in self._batches.items() if one is not group]
        return [join for batch in batches for join in batch.hand_over(lambda one: self._group(one.job) is group)]

    def _decode(self, batch: DecodeBatch, joins: Sequence[Join], *, steps: bool) -> None:
        """Bring a batch up to date, and run a step of it if ``steps``."""

        def reform_and_step() -> None:
            batch.reform(joins)
            if steps and batch.sequences:
                batch.step()

        jobs = {one.job for one in batch.sequences} | {one.job for join in joins for one in join.sequences}
        _contain(reform_and_step, partial(self._decoding_failed, batch, list(jobs)))

    def _decoding_failed(self, batch: DecodeBatch, jobs: Sequence[Job], error: Exception) -> None:
        self.failed_steps += 1
        batch.clear()
        _fail_all("decoding", jobs, error)

    def _group(self, job: Job) -> Group:
        return self._division.group_of(job.request.turn_taker)

    def _running(self) -> Iterator[RunningSequence]:
        """Yield the sequences of both batches, with those that have ended since the last ``reform``."""
        for batch in self._batches.values():
            yield from batch.sequences

    def _starting(self) -> set[Job]:
        """Return the jobs whose prompts are being read, or are in the cache while not all sequences have begun."""
        return {job for prefill in self._prefills for job in prefill.jobs} | self._prefilled.keys()

    def _held(self) -> Counter[str]:
        """Return the seats that each owner holds."""
        held = Counter(one.job.request.turn_taker for one in self._running() if one.runs)
        for job in self._starting():
            held[job.request.turn_taker] += job.seated
        return held

    def _shares(self) -> dict[Group, float]:
        """Return the sum of the owners' shares in each group that has a prompt to read or a sequence to decode."""
        found: dict[Group, dict[str, float]] = {}
        reading = [job for prefill in self._prefills for job in prefill.jobs if job.live]
        for job in [one.job for one in self._running() if one.runs] + reading:
            found.setdefault(self._group(job), {})[job.request.turn_taker] = job.request.share
        return {group: sum(shares.values()) for group, shares in found.items()}

    def _drop_ended_prompts(self) -> None:
        """Drop the prompts under way whose jobs have all ended: no group has a turn for them."""
        ended = [prefill for prefill in self._prefills if not any(job.live for job in prefill.jobs)]
        for prefill in ended:
            self._prefills.remove(prefill)

    def _seat(self) -> None:
        """Give free seats to waiting sequences, and begin the prompts that are not in the cache yet."""
        running = [one.job for one in self._running() if one.runs]
        starting = self._starting()
        held = self._held()
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
            is_alike = bool(blocks) and (job.request.scoring is None) == (blocks[-1][0].request.scoring is None)
            if is_alike and longest * (len(blocks[-1]) + 1) <= MAX_CELLS:
                blocks[-1].append(job)
            else:
                blocks.append([job])
                longest = job.prompt_length
        return [Prefill(block, self._forward) for block in blocks]

    def _advance_prompts(self, group: Group) -> None:
        """Run one chunk of the group's prompts whose turn it is."""
        for prefill in list(self._prefills):
            if group not in (self._group(job) for job in prefill.jobs if job.live):
                continue
            self._prefills.remove(prefill)
            self._prefills.append(prefill)
            prompts = _contain(partial(self._chunk_of, prefill), partial(self._prefill_failed, prefill))
            if prompts is not None:
                self._prefills.remove(prefill)
                self._prefilled.update((prompt.job, prompt) for prompt in prompts)
            return

    def _chunk_of(self, prefill: Prefill) -> list[Prefilled] | None:
        """Run a chunk: a short one while sequences decode, and one of bounded time while other owners may come."""
        cells = CELLS_BESIDE_DECODING
        if not self.running:
            cells = self._size.tokens(full=MAX_CELLS, least=CELLS_BESIDE_DECODING)
        began, done = self._clock(), prefill.cells_done
        prompts = prefill.advance(cells)
        self._size.note(prefill.cells_done - done, self._clock() - began)
        return prompts

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
