"""Cuts the sequences of a pass into micro-batches of similar lengths, right-padded.

Attention is causal, so padding changes no real position; it only costs. The bound: a micro-batch computes at most
``MAX_PADDING_RATIO`` positions for each real one, or ``SMALL_WASTE`` padded positions where that is more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contracts.operations import Datum, LossSpec
from engine.model.lora import LoraWeights

MAX_PADDING_RATIO = 1.25
SMALL_WASTE = 256
"""Fewer padded positions than this cost less than a micro-batch of their own."""
LEAST_POSITIONS = 256
"""A smaller micro-batch costs more than computing it beside others gains."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Sequence ``datum`` of the pass's member number ``member``, ``length`` tokens."""

    member: int
    datum: int
    length: int


@dataclass(frozen=True, slots=True)
class Member:
    """An operation's part in a pass: its loss, its sequences by number, its adapter."""

    loss: LossSpec
    data: Sequence[Datum] | Mapping[int, Datum]
    weights: LoraWeights


def split_for(rows: Sequence[PackedRow], *, at_once: int, token_budget: int) -> list[list[PackedRow]]:
    """Micro-batches, the largest first, of at most ``token_budget`` padded tokens in all the ``at_once`` computed at once.

    Where these share the budget out to less than ``LEAST_POSITIONS`` each, of that many; one row may be longer.
    """
    each = max(token_budget // at_once, min(token_budget, LEAST_POSITIONS))
    batches = split_rows(rows, token_budget=each)
    while len(batches) % at_once:
        largest = max(batches, key=padded_tokens)
        if len(largest) < 2 or padded_tokens(largest) < 2 * LEAST_POSITIONS:
            break
        place, half = batches.index(largest), len(largest) // 2
        batches[place : place + 1] = [largest[half:], largest[:half]]
    return sorted(batches, key=padded_tokens, reverse=True)


def split_rows(rows: Sequence[PackedRow], *, token_budget: int) -> list[list[PackedRow]]:
    """Micro-batches of at most ``token_budget`` padded tokens each, unless one row alone is longer."""
    batches: list[list[PackedRow]] = []
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


def padded_tokens(rows: Sequence[PackedRow]) -> int:
    """Positions that the micro-batch computes."""
    return len(rows) * max(row.length for row in rows)


def token_matrix(rows: Sequence[PackedRow], members: Sequence[Member] | Mapping[int, Member]) -> Tensor:
    """int64 (rows, longest), zero where padded."""
    longest = max(row.length for row in rows)
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    for place, row in enumerate(rows):
        tokens[place, : row.length] = members[row.member].data[row.datum].tokens
    return torch.from_numpy(tokens)


def real_positions(states: Tensor, rows: Sequence[PackedRow]) -> Tensor:
    """(real positions, features) of ``states`` (rows, longest, features): padding left out."""
    longest = states.shape[1]
    if all(row.length == longest for row in rows):
        return states.flatten(0, 1)
    lengths = torch.tensor([row.length for row in rows], device=states.device)
    is_real = torch.arange(longest, device=states.device)[None, :] < lengths[:, None]
    return states[is_real]
