"""Prefill of prompts in chunks: several prompts at once, a bounded number of tokens in a forward pass.

The bound keeps a long prompt from stalling the sequences that decode between its chunks.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from contracts.errors import EngineFailure
from engine.sampling.in_process.batch import Join, extend, left_padding
from engine.sampling.in_process.forward_pass import ForwardPass, adapter_segments
from engine.sampling.in_process.kv_cache import CachePart, KvCache, assemble
from engine.sampling.in_process.prompt_scores import PromptScores
from engine.sampling.in_process.sequences import Job
from engine.sampling.in_process.token_choice import ChoiceRules
from engine.sampling.replica import GenerateRequest

MAX_CELLS = 2048
"""Most tokens, padding included, in one forward pass."""
CELLS_BESIDE_DECODING = 256
"""Most of them while sequences decode: each of their tokens waits for a pass of a prompt. Less saves others little time."""
MAX_SCORED_LOGITS = 1 << 24
"""Most logits of one forward pass that scores its prompts: 64 MiB in fp32."""


class Prefilled:
    """A prompt in the KV cache with the logits of its first new token, float32 (V,). Its sequences begin here."""

    def __init__(self, job: Job, cache: KvCache, row: int, logits: Tensor) -> None:
        self.job = job
        self._cache = cache
        self._row = row
        self._logits = logits

    @property
    def bytes_per_token(self) -> int:
        """Cache memory of one token, in bytes."""
        return self._cache.bytes_per_token()

    def begin(self) -> Join:
        """Start the sequences that have a seat, at least one, and choose their first tokens."""
        sequences = self.job.begin()
        rules = ChoiceRules(tuple(sequence.params for sequence in sequences), self._logits.device)
        extend(sequences, rules, self._logits.expand(len(sequences), -1))
        return Join(sequences, self._cache, [self._row] * len(sequences))

    def detach(self) -> None:
        """Copy this prompt's part of the cache, so that a prompt that waits does not keep its companions' parts in memory."""
        if self._cache.rows > 1:
            part = CachePart(self._cache, [self._row], [0])
            self._cache, self._row = assemble([part], self.job.prompt_length), 0
            self._logits = self._logits.clone()


class Prefill:
    """Prompts of ``jobs`` in one right-aligned block, prefilled one chunk of columns at a time."""

    def __init__(self, jobs: Sequence[Job], forward: ForwardPass) -> None:
        self.jobs = sorted(jobs, key=lambda job: job.adapter_key)
        self._forward = forward
        lengths = [job.prompt_length for job in self.jobs]
        self._columns = max(lengths)
        self._padding = [self._columns - length for length in lengths]
        block = np.zeros((len(self.jobs), self._columns), np.int64)
        for row, job in enumerate(self.jobs):
            block[row, self._padding[row] :] = job.request.prompt
        self._tokens = torch.from_numpy(block).to(forward.device)
        self._mask = left_padding(lengths, self._columns, self._columns, forward.device)
        padding = torch.tensor(self._padding, device=forward.device)[:, None]
        self._positions = (torch.arange(self._columns, device=forward.device)[None] - padding).clamp(min=0)
        self._segments = adapter_segments([job.adapter for job in self.jobs])
        self._cache = KvCache()
        self._done = 0
        # The prefill's own, and not the job's: one that begins again draws the same alternatives from the seed.
        self._scores = [_scores_of(job.request) for job in self.jobs]
        scored = [pad + one.begin - 1 for pad, one in zip(self._padding, self._scores, strict=True) if one is not None]
        self._first_scored = min(scored, default=self._columns)

    @property
    def cells_done(self) -> int:
        """Number of tokens computed so far, padding included."""
        return self._done * len(self.jobs)

    def advance(self, cells: int) -> list[Prefilled] | None:
        """Run one chunk of at most ``cells`` tokens, padding included. Return the prompts after the last chunk, else None.

        A job whose scored logits are not finite fails alone. Any other exception is raised and concerns all jobs.
        """
        rows, start = len(self.jobs), self._done
        end = min(self._columns, start + max(1, min(cells, MAX_CELLS) // rows))
        scores = start >= self._first_scored
        if scores:
            end = min(end, start + max(1, MAX_SCORED_LOGITS // (rows * self._forward.vocabulary_size)))
        elif self._first_scored < end:
            end = self._first_scored
        for job, padding in zip(self.jobs, self._padding, strict=True):
            # Before the pass: one that fails has taken its time, too.
            job.note_read(max(0, end - padding))
        mask = None if self._mask is None else self._mask[:, :end]
        logits = self._forward(
            self._tokens[:, start:end],
            mask,
            self._positions[:, start:end],
            self._cache,
            self._segments,
            end - start if scores else 1,
        )
        if scores:
            self._score(logits, start)
        self._done = end
        if end < self._columns:
            return None
        last = logits[:, -1].float()
        rows_left = [(row, job) for row, job in enumerate(self.jobs) if job.live]
        for row, job in rows_left:
            if (found := self._scores[row]) is not None:
                job.report_scores(found.result)
        return [Prefilled(job, self._cache, row, last[row]) for row, job in rows_left]

    def _score(self, logits: Tensor, start: int) -> None:
        for row, (job, wanted) in enumerate(zip(self.jobs, self._scores, strict=True)):
            if wanted is None or not job.live:
                continue
            # Column c holds prompt position c - padding and predicts the one after it.
            skipped = max(0, self._padding[row] - start)
            first = start + skipped - self._padding[row] + 1
            try:
                wanted.add(logits[row, skipped:], first)
            except EngineFailure as failure:
                job.fail(failure)


def _scores_of(request: GenerateRequest) -> PromptScores | None:
    if request.scoring is None:
        return None
    return PromptScores(request.prompt, request.scoring, temperature=request.temperature, seed=request.seeds[0])
