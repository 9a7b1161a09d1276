"""The running batch of the in-process replica: all sequences that decode now, one token each a step, whatever their adapter.

Sequence i of the batch is row i of its tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.lora import LoraWeights
from engine.sampling.in_process.forward_pass import ActiveAdapters, DecodeAdapters, ForwardPass
from engine.sampling.in_process.kv_cache import CachePart, KvCache, assemble
from engine.sampling.in_process.sequences import RunningSequence
from engine.sampling.in_process.token_choice import ChoiceRules, choose_tokens

_ROWS_FOR_A_HOLE = 8
"""Rows of a batch for each hole that it may have: a hole is computed in vain."""


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
    """Sequences that decode in one batch, with their KV cache and their newest tokens. Not thread-safe.

    A row whose sequence has ended stays as a hole, which a sequence that joins fills. So the cache, whose copy may take
    longer than a step, is copied only when there are too many holes or too few, or when it has outgrown its sequences.
    """

    def __init__(self, forward: ForwardPass) -> None:
        self._forward = forward
        self._rows: list[RunningSequence | None] = []
        """Sequence of each row of the tensors; None in a hole."""
        self._live: Tensor | None = None
        """Numbers of the rows that are no holes, int64; None without holes."""
        self._laid_out = 0
        """Number of sequences for which a step is laid out."""
        self._cache = KvCache()
        self._mask: Tensor | None = None
        self._positions = torch.empty(0)
        self._newest = torch.empty(0)
        self._adapters = DecodeAdapters(forward.device)
        self._active: ActiveAdapters = []
        self._rules = ChoiceRules((), forward.device)

    @property
    def sequences(self) -> list[RunningSequence]:
        """Sequences of the batch, with those that have ended since the last ``reform``."""
        return [sequence for sequence in self._rows if sequence is not None]

    @property
    def running(self) -> int:
        """Number of sequences that have not ended."""
        return sum(sequence.runs for sequence in self.sequences)

    def hand_over(self, leaves: Callable[[RunningSequence], bool]) -> list[Join]:
        """Take the sequences that leave out of the batch, for another one. Call ``reform`` before the next step.

        They take a copy of their rows along: sequences that join this batch get the rows, and its steps go on.
        """
        rows = [row for row, one in enumerate(self._rows) if one is not None and one.runs and leaves(one)]
        if not rows:
            return []
        leaving = [one for row in rows if (one := self._rows[row]) is not None]
        for row in rows:
            self._rows[row] = None
        copied = list(range(len(rows)))
        cache = assemble([CachePart(self._cache, rows, copied)], max(one.cached for one in leaving))
        return [Join(leaving, cache, copied)]

    def reform(self, joins: Sequence[Join]) -> None:
        """Drop the ended sequences and add those of ``joins``, in one copy of the cache at most."""
        joining = [
            (sequence, join.cache, source)
            for join in joins
            for sequence, source in zip(join.sequences, join.source, strict=True)
            if sequence.runs
        ]
        kept = [row for row, sequence in enumerate(self._rows) if sequence is not None and sequence.runs]
        if len(kept) == self._laid_out and not joining and not self._is_outgrown(kept):
            return
        if not kept and not joining:
            self.clear()
        elif self._has_place_for(joining, kept):
            self._fill_holes(joining, kept)
        else:
            self._rebuild(joining, kept)

    def _is_outgrown(self, kept: Sequence[int]) -> bool:
        """Return whether the cache has more columns than its sequences ever need."""
        longest = max((one.job.final_length for row in kept if (one := self._rows[row]) is not None), default=0)
        return self._cache.columns >= longest

    def _has_place_for(self, joining: Sequence[tuple[RunningSequence, KvCache, int]], kept: Sequence[int]) -> bool:
        holes = len(self._rows) - len(kept) - len(joining)
        return (
            0 <= holes <= len(self._rows) // _ROWS_FOR_A_HOLE
            and all(sequence.cached <= self._cache.columns for sequence, _, _ in joining)
            and not self._is_outgrown(kept)
        )

    def _fill_holes(self, joining: Sequence[tuple[RunningSequence, KvCache, int]], kept: Sequence[int]) -> None:
        """Put the sequences that join into the rows of those that have ended."""
        holes = sorted(set(range(len(self._rows))) - set(kept))
        for row in holes:
            self._rows[row] = None
        for row, (sequence, cache, source) in zip(holes, joining, strict=False):
            self._cache.put(row, cache, source, sequence.cached)
            self._rows[row] = sequence
        columns = self._cache.columns
        # A hole has no tokens: it attends to what it makes from now on only, at positions that exist.
        lengths = [0 if sequence is None else sequence.cached for sequence in self._rows]
        newest = [0 if sequence is None else sequence.newest for sequence in self._rows]
        self._describe(lengths, newest, columns)

    def _rebuild(self, joining: Sequence[tuple[RunningSequence, KvCache, int]], kept: Sequence[int]) -> None:
        """Copy the rows of all sequences into a new cache, without holes."""
        entries = [(one, self._cache, row) for row in kept if (one := self._rows[row]) is not None] + list(joining)
        # The sort is stable: sequences of one adapter become neighbours, and stay in order of arrival among themselves.
        entries.sort(key=lambda entry: entry[0].job.adapter_key)
        parts: dict[int, CachePart] = {}
        for row, (_, cache, source) in enumerate(entries):
            part = parts.setdefault(id(cache), CachePart(cache, [], []))
            part.source.append(source)
            part.destination.append(row)
        self._rows = [sequence for sequence, _, _ in entries]
        lengths = [sequence.cached for sequence, _, _ in entries]
        self._cache = assemble(list(parts.values()), max(lengths))
        self._describe(lengths, [sequence.newest for sequence, _, _ in entries], max(lengths))

    def _describe(self, lengths: Sequence[int], newest: Sequence[int], columns: int) -> None:
        """Lay out what a step needs beside the cache: ``lengths`` and ``newest`` tokens of the rows, int each."""
        device, sequences = self._forward.device, self.sequences
        live = [row for row, sequence in enumerate(self._rows) if sequence is not None]
        self._live = torch.tensor(live, device=device) if len(live) < len(self._rows) else None
        self._laid_out = len(live)
        capacity = max(sequence.job.final_length for sequence in sequences)
        self._mask = left_padding(lengths, columns, capacity, device)
        self._positions = torch.tensor(lengths, device=device)[:, None]
        self._newest = torch.tensor(newest, device=device)
        self._active = self._adapters.on(_adapters_of(self._rows))
        self._rules = ChoiceRules(tuple(sequence.params for sequence in sequences), device)

    def step(self) -> None:
        """Make one token for every sequence. Call ``reform`` first: no sequence may have ended."""
        columns = self._cache.columns + 1
        mask = None if self._mask is None else self._mask[:, :columns]
        logits = self._forward(self._newest[:, None], mask, self._positions, self._cache, self._active, 1)[:, -1]
        if self._live is None:
            self._newest = extend(self.sequences, self._rules, logits.float())
        else:
            self._newest[self._live] = extend(self.sequences, self._rules, logits[self._live].float())
        self._positions += 1

    def clear(self) -> None:
        """Drop every sequence and free the cache."""
        self._rows = []
        self._live = None
        self._laid_out = 0
        self._cache = KvCache()
        self._adapters.clear()
        self._active = []


def _adapters_of(rows: Sequence[RunningSequence | None]) -> list[LoraWeights | None]:
    """Return the adapter of each row. A hole has that of the row before it, so that it divides no segment."""
    found: list[LoraWeights | None] = []
    for sequence in rows:
        found.append(sequence.job.adapter if sequence is not None else found[-1] if found else None)
    return found
