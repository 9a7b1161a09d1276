"""Cuts the sequences of a pass into micro-batches of similar lengths, right-padded.

Attention is causal, so padding changes no real position; it only costs. The bound: a micro-batch computes at most
``MAX_PADDING_RATIO`` positions for each real one, or ``SMALL_WASTE`` padded positions where that is more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.training.pass_operation import PassOperation

MAX_PADDING_RATIO = 1.25
SMALL_WASTE = 256
"""Fewer padded positions than this cost less than a micro-batch of their own."""


@dataclass(frozen=True, slots=True)
class Row:
    """Sequence ``datum`` of the pass's member number ``member``, ``length`` tokens."""

    member: int
    datum: int
    length: int


def split_rows(rows: Sequence[Row], *, token_budget: int) -> list[list[Row]]:
    """Micro-batches of at most ``token_budget`` padded tokens each, unless one row alone is longer."""
    batches: list[list[Row]] = []
    real = 0
    for row in sorted(rows, key=lambda row: -row.length):
        if batches:
            padded = (len(batches[-1]) + 1) * batches[-1][0].length
            waste = padded - real - row.length
            is_wasteful = waste > SMALL_WASTE and padded > MAX_PADDING_RATIO * (real + row.length)
            if padded <= token_budget and not is_wasteful:
                batches[-1].append(row)
                real += row.length
                continue
        batches.append([row])
        real = row.length
    return batches


def padded_tokens(rows: Sequence[Row]) -> int:
    """Positions that the micro-batch computes."""
    return len(rows) * max(row.length for row in rows)


def token_matrix(rows: Sequence[Row], operations: Sequence[PassOperation]) -> Tensor:
    """int64 (rows, longest), zero where padded."""
    longest = max(row.length for row in rows)
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    for place, row in enumerate(rows):
        tokens[place, : row.length] = operations[row.member].batch.data[row.datum].tokens
    return torch.from_numpy(tokens)


def real_positions(states: Tensor, rows: Sequence[Row]) -> Tensor:
    """(real positions, features) of ``states`` (rows, longest, features): padding left out."""
    longest = states.shape[1]
    if all(row.length == longest for row in rows):
        return states.flatten(0, 1)
    lengths = torch.tensor([row.length for row in rows], device=states.device)
    is_real = torch.arange(longest, device=states.device)[None, :] < lengths[:, None]
    return states[is_real]
