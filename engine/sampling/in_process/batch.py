"""The running batch: all sequences that decode now, whatever their adapter, one token a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.in_process.forward_pass import ActiveAdapters, DecodeAdapters, ForwardPass
from engine.sampling.in_process.kv_cache import CachePart, KvCache, assemble
from engine.sampling.in_process.sequences import Row
from engine.sampling.in_process.token_choice import ChoiceRules, choose_tokens


@dataclass(frozen=True, slots=True)
class Join:
    """Rows that begin to decode: row ``rows[i]`` continues row ``source[i]`` of ``cache``."""

    rows: list[Row]
    cache: KvCache
    source: list[int]


def left_padding(lengths: Sequence[int], columns: int, capacity: int, device: torch.device) -> Tensor | None:
    """Attention mask bool (rows, capacity) of right-aligned rows, True on tokens; None when no row has padding."""
    padding = torch.tensor([columns - length for length in lengths], device=device)
    if not any(length < columns for length in lengths):
        return None
    return torch.arange(capacity, device=device)[None, :] >= padding[:, None]


def extend_rows(rows: Sequence[Row], rules: ChoiceRules, logits: Tensor) -> Tensor:
    """Choose each row's next token from ``logits`` float32 (B, V) and let the rows take it; returns int64 (B,).

    The logprob is that of the unscaled distribution (``log_softmax`` of the logits).
    """
    tokens = choose_tokens(
        logits, rules, [0.0] * len(rows) if rules.all_greedy else [r.uniforms.random() for r in rows]
    )
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, tokens[:, None]).squeeze(-1) - normaliser
    topk = _likeliest(rows, logits, normaliser)
    # One transfer for both; float64 holds every token id exactly.
    chosen, scores = torch.stack([tokens.double(), logprobs.double()]).tolist()
    for position, row in enumerate(rows):
        if row.runs:
            row.accept(int(chosen[position]), scores[position], topk.get(position))
    return tokens


def _likeliest(
    rows: Sequence[Row], logits: Tensor, normaliser: Tensor
) -> dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]]:
    asking = [position for position, row in enumerate(rows) if row.topk > 0]
    if not asking:
        return {}
    k = min(max(rows[position].topk for position in asking), logits.shape[-1])
    values, ids = logits[asking].topk(k, dim=-1)
    logprobs = (values - normaliser[asking, None]).cpu().numpy()
    token_ids = ids.int().cpu().numpy()
    return {
        position: (token_ids[i, : rows[position].topk], logprobs[i, : rows[position].topk])
        for i, position in enumerate(asking)
    }


class DecodeBatch:
    """Rows, their cache and their newest tokens. Not thread-safe."""

    def __init__(self, forward: ForwardPass) -> None:
        self._forward = forward
        self.rows: list[Row] = []
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
        return max((row.job.final_length for row in self.rows if row.runs), default=0)

    @property
    def running(self) -> int:
        """Rows that have not ended."""
        return sum(row.runs for row in self.rows)

    def reform(self, joins: Sequence[Join]) -> None:
        """Drop the rows that have ended and take in ``joins``, in one copy of the cache."""
        kept = [(row, 0, position) for position, row in enumerate(self.rows) if row.runs]
        if len(kept) == len(self.rows) and not joins:
            return
        entries = kept + [
            (row, part, source)
            for part, join in enumerate(joins, start=1)
            for row, source in zip(join.rows, join.source, strict=True)
            if row.runs
        ]
        if not entries:
            self.clear()
            return
        # The sort is stable, so rows of one adapter are neighbours and else stay in order of arrival.
        entries.sort(key=lambda entry: entry[0].job.order)
        caches = [self._cache, *(join.cache for join in joins)]
        parts = []
        for number, cache in enumerate(caches):
            mine = [(source, place) for place, (_, part, source) in enumerate(entries) if part == number]
            if mine:
                parts.append(CachePart(cache, [source for source, _ in mine], [place for _, place in mine]))
        self._take([row for row, _, _ in entries], parts)

    def _take(self, rows: list[Row], parts: Sequence[CachePart]) -> None:
        device = self._forward.device
        lengths = [row.cached for row in rows]
        columns = max(lengths)
        self._cache = assemble(parts, columns)
        self.rows = rows
        self._mask = left_padding(lengths, columns, max(row.job.final_length for row in rows), device)
        self._positions = torch.tensor(lengths, device=device)[:, None]
        self._newest = torch.tensor([row.newest for row in rows], device=device)
        self._active = self._adapters.on([row.job.adapter for row in rows])
        self._rules = ChoiceRules(tuple(row.params for row in rows), device)

    def step(self) -> None:
        """One token for every row; call with no ended row among them."""
        columns = self._cache.columns + 1
        mask = None if self._mask is None else self._mask[:, :columns]
        logits = self._forward(self._newest[:, None], mask, self._positions, self._cache, self._active, 1)
        self._newest = extend_rows(self.rows, self._rules, logits[:, -1].float())
        self._positions += 1

    def clear(self) -> None:
        """Forget every row."""
        self.rows = []
        self._cache = KvCache()
        self._adapters.clear()
        self._active = []
