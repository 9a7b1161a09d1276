"""Cuts the sequences of a pass into micro-batches of similar lengths, right-padded.

A packed row is one sequence of the pass, and becomes one row of the micro-batch's token matrix. Attention is causal, so
padding changes no real position; it only costs time. The bound on that cost: a micro-batch computes at most
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
"""Padded positions that cost less than one more micro-batch would."""
LEAST_POSITIONS = 256
"""Positions below which a micro-batch costs more than computing it beside others gains."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One sequence of a pass: number ``datum`` of member number ``member``, ``length`` tokens long."""

    member: int
    datum: int
    length: int


@dataclass(frozen=True, slots=True)
class Member:
    """An operation in a pass: its loss, its sequences by number, its adapter's weights."""

    loss: LossSpec
    data: Sequence[Datum] | Mapping[int, Datum]
    weights: LoraWeights


def split_for(rows: Sequence[PackedRow], *, at_once: int, token_budget: int) -> list[list[PackedRow]]:
    """Cut ``rows`` into micro-batches, the largest first, of which ``at_once`` are computed at the same time.

    Each micro-batch gets an equal part of ``token_budget`` padded tokens, but at least ``LEAST_POSITIONS`` (or the whole
    budget, if the budget is less). A single row may be longer.
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
    """Cut ``rows`` into micro-batches of at most ``token_budget`` padded tokens each; a single row may be longer."""
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
    """Return the positions that a micro-batch of ``rows`` computes, padding included."""
    return len(rows) * max(row.length for row in rows)


def token_matrix(rows: Sequence[PackedRow], members: Sequence[Member] | Mapping[int, Member]) -> Tensor:
    """Return the rows' token ids, int64 (rows, longest row), zero where padded."""
    longest = max(row.length for row in rows)
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    for place, row in enumerate(rows):
        tokens[place, : row.length] = members[row.member].data[row.datum].tokens
    return torch.from_numpy(tokens)


def real_positions(states: Tensor, rows: Sequence[PackedRow]) -> Tensor:
    """Return ``states`` (rows, longest row, features) without padding: (real positions, features)."""
    longest = states.shape[1]
    if all(row.length == longest for row in rows):
        return states.flatten(0, 1)
    lengths = torch.tensor([row.length for row in rows], device=states.device)
    is_real = torch.arange(longest, device=states.device)[None, :] < lengths[:, None]
    return states[is_real]
