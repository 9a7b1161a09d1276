"""The running batch of the in-process replica: all sequences that decode now, one token each a step, whatever their adapter.

Sequence i of the batch is row i of its tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.in_process.forward_pass import ActiveAdapters, DecodeAdapters, ForwardPass
from engine.sampling.in_process.kv_cache import CachePart, KvCache, assemble
from engine.sampling.in_process.sequences import RunningSequence
from engine.sampling.in_process.token_choice import ChoiceRules, choose_tokens


@dataclass(frozen=True, slots=True)
class Join:
    """Sequences that begin to decode: ``sequences[i]`` continues row ``source[i]`` of ``cache``."""

    sequences: list[RunningSequence]
    cache: KvCache
    source: list[int]


def left_padding(lengths: Sequence[int], columns: int, capacity: int, device: torch.device) -> Tensor | None:
    """Return the attention mask, bool (rows, capacity), of right-aligned rows: True on tokens. None without padding."""
    padding = torch.tensor([columns - length for length in lengths], device=device)
    if not any(length < columns for length in lengths):
        return None
    return torch.arange(capacity, device=device)[None, :] >= padding[:, None]


def extend(sequences: Sequence[RunningSequence], rules: ChoiceRules, logits: Tensor) -> Tensor:
    """Choose each sequence's next token from ``logits`` float32 (B, V) and append it; return the tokens, int64 (B,).

    The reported logprob is the unscaled distribution's (``log_softmax`` of the logits).
    """
    uniforms = [0.0] * len(sequences) if rules.all_greedy else [one.uniforms.random() for one in sequences]
    tokens = choose_tokens(logits, rules, uniforms)
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, tokens[:, None]).squeeze(-1) - normaliser
    topk = _likeliest(sequences, logits, normaliser)
    # One transfer for tokens and logprobs; float64 holds every token id exactly.
    chosen, scores = torch.stack([tokens.double(), logprobs.double()]).tolist()
    for position, sequence in enumerate(sequences):
        if sequence.runs:
            sequence.append(int(chosen[position]), scores[position], topk.get(position))
    return tokens


def _likeliest(
    sequences: Sequence[RunningSequence], logits: Tensor, normaliser: Tensor
) -> dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]]:
    asking = [position for position, sequence in enumerate(sequences) if sequence.topk > 0]
    if not asking:
        return {}
    k = min(max(sequences[position].topk for position in asking), logits.shape[-1])
    values, ids = logits[asking].topk(k, dim=-1)
    logprobs = (values - normaliser[asking, None]).cpu().numpy()
    token_ids = ids.int().cpu().numpy()
    return {
        position: (token_ids[i, : sequences[position].topk], logprobs[i, : sequences[position].topk])
        for i, position in enumerate(asking)
    }


class DecodeBatch:
    """Sequences that decode in one batch, with their KV cache and their newest tokens. Not thread-safe."""

    def __init__(self, forward: ForwardPass) -> None:
        self._forward = forward
        self.sequences: list[RunningSequence] = []
        self._cache = KvCache()
        self._mask: Tensor | None = None
        self._positions = torch.empty(0)
        self._newest = torch.empty(0)
        self._adapters = DecodeAdapters(forward.device)
        self._active: ActiveAdapters = []
        self._rules = ChoiceRules((), forward.device)

    @property
    def final_length(self) -> int:
        """Columns that the batch may come to need."""
        return max((sequence.job.final_length for sequence in self.sequences if sequence.runs), default=0)

    @property
    def running(self) -> int:
        """Number of sequences that have not ended."""
        return sum(sequence.runs for sequence in self.sequences)

    def reform(self, joins: Sequence[Join]) -> None:
        """Drop the ended sequences and add those of ``joins``, in one copy of the cache."""
        kept = [(sequence, 0, row) for row, sequence in enumerate(self.sequences) if sequence.runs]
        if len(kept) == len(self.sequences) and not joins:
            return
        entries = kept + [
            (sequence, part, source)
            for part, join in enumerate(joins, start=1)
            for sequence, source in zip(join.sequences, join.source, strict=True)
            if sequence.runs
        ]
        if not entries:
            self.clear()
            return
        # The sort is stable: sequences of one adapter become neighbours, and stay in order of arrival among themselves.
        entries.sort(key=lambda entry: entry[0].job.adapter_key)
        caches = [self._cache, *(join.cache for join in joins)]
        parts = []
        for number, cache in enumerate(caches):
            mine = [(source, row) for row, (_, part, source) in enumerate(entries) if part == number]
            if mine:
                parts.append(CachePart(cache, [source for source, _ in mine], [row for _, row in mine]))
        self._rebuild([sequence for sequence, _, _ in entries], parts)

    def _rebuild(self, sequences: list[RunningSequence], parts: Sequence[CachePart]) -> None:
        device = self._forward.device
        lengths = [sequence.cached for sequence in sequences]
        columns = max(lengths)
        self._cache = assemble(parts, columns)
        self.sequences = sequences
        capacity = max(sequence.job.final_length for sequence in sequences)
        self._mask = left_padding(lengths, columns, capacity, device)
        self._positions = torch.tensor(lengths, device=device)[:, None]
        self._newest = torch.tensor([sequence.newest for sequence in sequences], device=device)
        self._active = self._adapters.on([sequence.job.adapter for sequence in sequences])
        self._rules = ChoiceRules(tuple(sequence.params for sequence in sequences), device)

    def step(self) -> None:
        """Make one token for every sequence. Call ``reform`` first: no sequence may have ended."""
        columns = self._cache.columns + 1
        mask = None if self._mask is None else self._mask[:, :columns]
        logits = self._forward(self._newest[:, None], mask, self._positions, self._cache, self._active, 1)
        self._newest = extend(self.sequences, self._rules, logits[:, -1].float())
        self._positions += 1

    def clear(self) -> None:
        """Drop every sequence and free the cache."""
        self.sequences = []
        self._cache = KvCache()
        self._adapters.clear()
        self._active = []
