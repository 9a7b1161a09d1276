"""One fused forward (and backward) over sequences of many adapters.

Sequences are sorted by length into micro-batches under a token budget, right-padded: attention is causal, so padding
changes no real position. Rows of one adapter stand together, so that each adapter is one segment.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.contracts.operations import Datum, ForwardBackwardOutput, TrainingBatch
from engine.training.base import BaseModel
from engine.training.lora import AdapterSegment, LoraWeights
from engine.training.losses import compute_loss, flat_inputs
from engine.training.target_logprobs import CHUNK_LOGITS, gather_logprobs, target_logprobs

log = logging.getLogger(__name__)

MAX_PADDING_RATIO = 2.0
"""A micro-batch computes at most this many positions for each real one."""
_MIN_SPLIT_TOKENS = 256
"""Below this many padded tokens a pass of its own costs more than the padding."""


@dataclass(frozen=True, slots=True)
class PassMember:
    """An item of the pass with its adapter; ``index`` is the caller's."""

    index: int
    batch: TrainingBatch
    backward: bool
    weights: LoraWeights


@dataclass(slots=True)
class MemberResult:
    """What came of a member; ``gradients`` in the order of ``LoraWeights.flat()`` unless it failed or had no backward."""

    outcome: ForwardBackwardOutput | WeftError
    gradients: list[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence: which member's, which of its data, how long."""

    member: int
    datum: int
    length: int


@dataclass(slots=True)
class _Progress:
    """A member's sums over micro-batches."""

    logprobs: list[np.ndarray | None]
    loss: float = 0.0
    gradients: list[Tensor] | None = None
    error: WeftError | None = None


@dataclass(frozen=True, slots=True)
class _Share:
    """A member's part of one micro-batch: its rows, and its targets' places among all the micro-batch's."""

    place: int
    rows: list[_Row]
    targets: slice


class FusedPass:
    """Runs the members, no two of which share an adapter. Their batches have passed ``check_batch``."""

    def __init__(self, base: BaseModel, members: Sequence[PassMember], *, token_budget: int) -> None:
        self._base = base
        self._members = members
        # A head of its own kind gives all logits at once: fewer tokens go together then.
        whole_logits = max(1, CHUNK_LOGITS // base.facts.vocabulary_size)
        self._token_budget = token_budget if base.has_plain_head else min(token_budget, whole_logits)
        self._progress = [_Progress(logprobs=[None] * len(member.batch.data)) for member in members]

    def run(self) -> list[MemberResult]:
        """Every member's result, in order."""
        for backward in (True, False):
            rows = [
                _Row(place, number, len(datum.tokens))
                for place, member in enumerate(self._members)
                if member.backward is backward
                for number, datum in enumerate(member.batch.data)
            ]
            for micro_batch in split_rows(rows, token_budget=self._token_budget):
                self._run_micro_batch(micro_batch, backward=backward)
        return [self._result(place) for place in range(len(self._members))]

    def _run_micro_batch(self, rows: list[_Row], *, backward: bool) -> None:
        """Compute the rows of members that still stand; where that breaks, each member again by itself."""
        rows = [row for row in rows if self._progress[row.member].error is None]
        if not rows:
            return
        try:
            with torch.set_grad_enabled(backward):
                self._compute(sorted(rows, key=lambda row: (row.member, row.datum)), backward=backward)
        except (RuntimeError, WeftError):
            groups: dict[int, list[_Row]] = {}
            for row in rows:
                groups.setdefault(row.member, []).append(row)
            log.exception(
                "micro-batch failed base=%s rows=%d members=%d", self._base.facts.name, len(rows), len(groups)
            )
            if len(groups) == 1:
                self._progress[rows[0].member].error = EngineFailure(
                    "weft could not compute this pass, possibly for lack of memory; try fewer or shorter sequences"
                )
                return
            for group in groups.values():
                self._run_micro_batch(group, backward=backward)

    def _compute(self, rows: list[_Row], *, backward: bool) -> None:
        """One fused forward (and backward); nothing is noted until all of it has worked."""
        logprobs = self._logprobs(rows)
        shares = self._shares(rows)
        losses = [self._loss(share, logprobs[share.targets]) for share in shares]
        noted = torch.stack([loss.detach() for loss in losses]).tolist()
        values = logprobs.detach().cpu().numpy()
        sound = [
            number
            for number, share in enumerate(shares)
            if math.isfinite(noted[number]) and np.isfinite(values[share.targets]).all()
        ]
        gradients: dict[int, list[Tensor]] = {}
        if backward and sound:
            gradients = self._gradients([losses[number] for number in sound], [shares[n].place for n in sound])
        for number, share in enumerate(shares):
            if number in sound:
                self._note(share, noted[number], values[share.targets], gradients.get(share.place))
            else:
                self._progress[share.place].error = InvalidRequest(
                    "the loss is not finite: lower the weights, advantages or learning rate"
                )

    def _logprobs(self, rows: list[_Row]) -> Tensor:
        """Log-probabilities of all targets of the rows, flat."""
        targets = [torch.from_numpy(self._datum(row).targets.copy()) for row in rows]
        if self._base.has_plain_head:
            hidden = self._real_positions(rows, self._base.hidden_states)
            segments = self._segments(rows, by_tokens=True)
            return target_logprobs(self._base, hidden, token_segments=segments, targets=targets)
        return gather_logprobs(self._real_positions(rows, self._base.logits), targets)

    def _real_positions(self, rows: list[_Row], forward: Callable[[Tensor], Tensor]) -> Tensor:
        """What ``forward`` gives for the rows, (real positions, features): padding left out."""
        longest = max(row.length for row in rows)
        tokens = np.zeros((len(rows), longest), dtype=np.int64)
        for place, row in enumerate(rows):
            tokens[place, : row.length] = self._datum(row).tokens
        with self._base.adapters(self._segments(rows, by_tokens=False)):
            states = forward(torch.from_numpy(tokens).to(self._base.device))
        if all(row.length == longest for row in rows):
            return states.flatten(0, 1)
        lengths = torch.tensor([row.length for row in rows], device=states.device)
        is_real = torch.arange(longest, device=states.device)[None, :] < lengths[:, None]
        return states[is_real]

    def _segments(self, rows: list[_Row], *, by_tokens: bool) -> list[AdapterSegment]:
        segments, at = [], 0
        for place, group in _by_member(rows):
            size = sum(row.length for row in group) if by_tokens else len(group)
            segments.append(AdapterSegment(self._members[place].weights, at, at + size))
            at += size
        return segments

    def _shares(self, rows: list[_Row]) -> list[_Share]:
        shares, at = [], 0
        for place, group in _by_member(rows):
            count = sum(self._datum(row).targets.size for row in group)
            shares.append(_Share(place, group, slice(at, at + count)))
            at += count
        return shares

    def _loss(self, share: _Share, logp: Tensor) -> Tensor:
        spec = self._members[share.place].batch.loss
        data = [self._datum(row) for row in share.rows]
        inputs = {name: torch.from_numpy(values).to(logp.device) for name, values in flat_inputs(spec, data).items()}
        return compute_loss(spec, logp, inputs)

    def _gradients(self, losses: list[Tensor], places: list[int]) -> dict[int, list[Tensor]]:
        """Gradients of the summed losses; rows are independent, so each adapter gets its own member's only."""
        parameters = [self._members[place].weights.flat() for place in places]
        flat = [parameter for group in parameters for parameter in group]
        gradients = iter(torch.autograd.grad(torch.stack(losses).sum(), flat, allow_unused=True))
        return {
            place: [torch.zeros_like(parameter) if (g := next(gradients)) is None else g for parameter in group]
            for place, group in zip(places, parameters, strict=True)
        }

    def _note(self, share: _Share, loss: float, values: np.ndarray, gradients: list[Tensor] | None) -> None:
        progress, at = self._progress[share.place], 0
        for row in share.rows:
            targets = self._datum(row).targets
            progress.logprobs[row.datum] = values[at : at + targets.size].reshape(targets.shape).copy()
            at += targets.size
        progress.loss += loss
        if progress.gradients is None or gradients is None:
            progress.gradients = gradients
        else:
            torch._foreach_add_(progress.gradients, gradients)

    def _result(self, place: int) -> MemberResult:
        progress, member = self._progress[place], self._members[place]
        if progress.error is not None:
            return MemberResult(progress.error)
        logprobs = [row for row in progress.logprobs if row is not None]
        if len(logprobs) != len(member.batch.data):
            return MemberResult(EngineFailure("the pass left out a sequence"))
        tokens = sum(len(datum.tokens) for datum in member.batch.data)
        metrics = {"loss:sum": progress.loss, "tokens:sum": float(tokens)}
        return MemberResult(ForwardBackwardOutput(logprobs, metrics), progress.gradients)

    def _datum(self, row: _Row) -> Datum:
        return self._members[row.member].batch.data[row.datum]


def _by_member(rows: list[_Row]) -> list[tuple[int, list[_Row]]]:
    """Runs of rows of one member, in order."""
    groups: list[tuple[int, list[_Row]]] = []
    for row in rows:
        if not groups or groups[-1][0] != row.member:
            groups.append((row.member, []))
        groups[-1][1].append(row)
    return groups


def split_rows(rows: Sequence[_Row], *, token_budget: int) -> list[list[_Row]]:
    """Micro-batches of similar lengths: at most ``token_budget`` padded tokens each, unless one row alone is longer."""
    batches: list[list[_Row]] = []
    real = 0
    for row in sorted(rows, key=lambda row: -row.length):
        if batches:
            padded = (len(batches[-1]) + 1) * batches[-1][0].length
            is_wasteful = padded > MAX_PADDING_RATIO * (real + row.length) and padded > _MIN_SPLIT_TOKENS
            if padded <= token_budget and not is_wasteful:
                batches[-1].append(row)
                real += row.length
                continue
        batches.append([row])
        real = row.length
    return batches
