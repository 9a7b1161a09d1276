"""One fused forward (and backward) over sequences of many operations on many adapters.

Every operation is a member of its own, so that it gets its own gradient and fails alone, even beside another of the same
adapter. Members whose adapters have one layout stand together, and so do the rows of a member.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from engine.contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.contracts.operations import Datum, LossSpec
from engine.training.base import BaseModel
from engine.training.lora import LoraWeights
from engine.training.losses import flat_inputs, loss_terms
from engine.training.low_rank import LowRankPlan, StackedGroup, Stopwatch
from engine.training.micro_batch import Row, padded_tokens, real_positions, token_matrix
from engine.training.micro_batch_threads import MicroBatchThreads
from engine.training.pass_operation import PassOperation, PassPiece, PassReport
from engine.training.target_logprobs import CHUNK_LOGITS, gather_logprobs, target_logprobs

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sums:
    """What a member's sequences of this pass add up to."""

    logprobs: dict[int, np.ndarray]
    loss: float = 0.0
    gradient: Tensor | None = None
    error: WeftError | None = None


@dataclass(frozen=True, slots=True)
class _Share:
    """A member's part of one micro-batch: its rows, and its targets' places among all the micro-batch's."""

    member: int
    rows: list[Row]
    targets: slice


@dataclass(frozen=True, slots=True)
class _Computed:
    """What a micro-batch gave: by share its loss, whether that is sound, and (members) gradients; ``logprobs`` of all."""

    shares: list[_Share]
    losses: list[float]
    is_sound: list[bool]
    logprobs: np.ndarray
    gradients: dict[int, Tensor]


@dataclass(slots=True)
class _Clocks:
    """Where the time of one micro-batch goes; several run at once."""

    low_rank: Stopwatch = field(default_factory=Stopwatch)
    loss: Stopwatch = field(default_factory=Stopwatch)
    all: Stopwatch = field(default_factory=Stopwatch)


class FusedPass:
    """Computes the pieces, no two of one operation. Their batches have passed ``check_batch``.

    ``weights[i]`` is the adapter of ``pieces[i]``. Micro-batches are computed beside each other and noted in order, so sums
    do not depend on which ends first.
    """

    def __init__(
        self,
        base: BaseModel,
        pieces: Sequence[PassPiece],
        weights: Sequence[LoraWeights],
        *,
        token_budget: int,
        threads: MicroBatchThreads,
    ) -> None:
        self._base = base
        self._threads = threads
        self._operations = [piece.operation for piece in pieces]
        self._counts = [piece.sequences for piece in pieces]
        self._weights = weights
        # A head of its own kind gives all logits at once: fewer tokens go together then.
        whole_logits = max(1, CHUNK_LOGITS // base.facts.vocabulary_size)
        self._token_budget = token_budget if base.has_plain_head else min(token_budget, whole_logits)
        self._sums = [_Sums(logprobs={}) for _ in pieces]
        self._clocks: list[_Clocks] = []
        self._padded = 0

    def run(self) -> PassReport:
        """Compute all pieces and note in each operation what came out, or the error that ended it."""
        started = perf_counter()
        tokens = sequences = 0
        for backward in (True, False):
            rows = [row for row in self._rows() if self._operations[row.member].backward is backward]
            tokens, sequences = tokens + sum(row.length for row in rows), sequences + len(rows)
            batches = self._threads.split(rows, token_budget=self._token_budget)
            for batch, computed in zip(
                batches, self._threads.map(partial(self._attempt, backward=backward), batches), strict=True
            ):
                self._take(batch, computed, backward=backward)
        for operation, count, sums in zip(self._operations, self._counts, self._sums, strict=True):
            _note(operation, count, sums)
        seconds = perf_counter() - started
        # The clocks of micro-batches that run at once add up to more than the time that passes.
        share = seconds / (sum(clocks.all.seconds for clocks in self._clocks) or 1.0)
        return PassReport(
            adapters=len({operation.run for operation in self._operations}),
            sequences=sequences,
            tokens=tokens,
            padded_tokens=self._padded,
            seconds=seconds,
            low_rank_seconds=share * sum(clocks.low_rank.seconds for clocks in self._clocks),
            loss_seconds=share * sum(clocks.loss.seconds for clocks in self._clocks),
        )

    def _rows(self) -> list[Row]:
        return [
            Row(member, number, len(operation.batch.data[number].tokens))
            for member, (operation, count) in enumerate(zip(self._operations, self._counts, strict=True))
            for number in range(operation.computed, operation.computed + count)
        ]

    def _take(self, rows: list[Row], computed: _Computed | None, *, backward: bool) -> None:
        """Note what a micro-batch gave; where it broke, compute each member again by itself."""
        if computed is not None:
            self._note(computed)
            return
        members = sorted({row.member for row in rows if self._sums[row.member].error is None})
        if len({row.member for row in rows}) == 1:
            for member in members:
                self._sums[member].error = EngineFailure(
                    "weft could not compute this pass, possibly for lack of memory; try fewer or shorter sequences"
                )
            return
        # One after another: what the failed attempt held is free again, and they must not need it at once.
        for member in members:
            alone = [row for row in rows if row.member == member]
            self._take(alone, self._attempt(alone, backward=backward), backward=backward)

    def _attempt(self, rows: list[Row], *, backward: bool) -> _Computed | None:
        """One fused forward (and backward), in any thread: it changes nothing. None when that breaks."""
        clocks = _Clocks()
        self._clocks.append(clocks)
        try:
            with torch.set_grad_enabled(backward), clocks.all.measure():
                return self._compute(rows, clocks, backward=backward)
        except (RuntimeError, WeftError):
            log.exception("micro-batch failed base=%s rows=%d", self._base.facts.name, len(rows))
            return None

    def _compute(self, rows: list[Row], clocks: _Clocks, *, backward: bool) -> _Computed:
        by_member: dict[int, list[Row]] = {}
        for row in rows:
            by_member.setdefault(row.member, []).append(row)
        layouts = {member: self._weights[member].layout.key for member in by_member}
        grouped = [[m for m in by_member if layouts[m] == key] for key in dict.fromkeys(layouts.values())]
        groups = [self._stack(members, trains=backward) for members in grouped]
        shares = self._shares([member for members in grouped for member in members], by_member)
        logprobs = self._logprobs(groups, grouped, by_member, clocks)
        with clocks.loss.measure():
            losses = self._losses(shares, logprobs)
            noted = losses.detach().tolist()
            values = logprobs.detach().cpu().numpy()
        is_sound = [
            math.isfinite(loss) and bool(np.isfinite(values[share.targets]).all())
            for share, loss in zip(shares, noted, strict=True)
        ]
        gradients: dict[int, Tensor] = {}
        if backward and any(is_sound):
            total = losses.sum() if all(is_sound) else losses[torch.tensor(is_sound, device=losses.device)].sum()
            gradients = _gradients(total, groups, grouped)
        return _Computed(shares, noted, is_sound, values, gradients)

    def _note(self, computed: _Computed) -> None:
        """Add a micro-batch to its members' sums; those that have failed stay so."""
        self._padded += padded_tokens([row for share in computed.shares for row in share.rows])
        for share, loss, is_sound in zip(computed.shares, computed.losses, computed.is_sound, strict=True):
            sums = self._sums[share.member]
            if sums.error is not None:
                continue
            if is_sound:
                self._add(share, loss, computed.logprobs[share.targets], computed.gradients.get(share.member))
            else:
                sums.error = InvalidRequest("the loss is not finite: lower the weights, advantages or learning rate")

    def _stack(self, members: Sequence[int], *, trains: bool) -> StackedGroup:
        weights = [self._weights[member] for member in members]
        return StackedGroup(weights[0].layout, weights, self._base.dtype, trains=trains)

    def _logprobs(
        self, groups: list[StackedGroup], grouped: list[list[int]], by_member: dict[int, list[Row]], clocks: _Clocks
    ) -> Tensor:
        """Log-probabilities of all targets of the rows, flat, members in the order of ``grouped``."""
        rows = [row for members in grouped for member in members for row in by_member[member]]
        targets = [torch.from_numpy(self._datum(row).targets.copy()) for row in rows]
        counts = [[len(by_member[member]) for member in members] for members in grouped]
        plan = LowRankPlan.of_rows(groups, counts, max(row.length for row in rows), clocks.low_rank)
        if not self._base.has_plain_head:
            return gather_logprobs(self._real_positions(rows, plan, self._base.logits), targets)
        hidden = self._real_positions(rows, plan, self._base.hidden_states)
        tokens = [[sum(row.length for row in by_member[member]) for member in members] for members in grouped]
        with clocks.loss.measure():
            head_plan = LowRankPlan.of_tokens(groups, tokens, clocks.low_rank)
            return target_logprobs(self._base, hidden, plan=head_plan, targets=targets)

    def _real_positions(self, rows: list[Row], plan: LowRankPlan, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """What ``forward`` gives for the rows, (real positions, features): padding left out."""
        with self._base.adapters(plan):
            states = forward(token_matrix(rows, self._operations).to(self._base.device))
        return real_positions(states, rows)

    def _shares(self, members: Sequence[int], by_member: dict[int, list[Row]]) -> list[_Share]:
        shares, at = [], 0
        for member in members:
            count = sum(self._datum(row).targets.size for row in by_member[member])
            shares.append(_Share(member, by_member[member], slice(at, at + count)))
            at += count
        return shares

    def _losses(self, shares: Sequence[_Share], logprobs: Tensor) -> Tensor:
        """Each share's loss, (shares,). Members with one loss and config are computed together."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, share in enumerate(shares):
            spec = self._operations[share.member].batch.loss
            alike.setdefault((spec.name, *sorted(spec.config.items())), []).append(number)
        losses: list[Tensor | None] = [None] * len(shares)
        for numbers in alike.values():
            parts = [shares[number] for number in numbers]
            terms = self._terms(self._operations[parts[0].member].batch.loss, parts, logprobs)
            sizes = [part.targets.stop - part.targets.start for part in parts]
            for number, part in zip(numbers, torch.split(terms, sizes), strict=True):
                losses[number] = part.sum()
        return torch.stack([loss for loss in losses if loss is not None])

    def _terms(self, spec: LossSpec, shares: Sequence[_Share], logprobs: Tensor) -> Tensor:
        data = [self._datum(row) for share in shares for row in share.rows]
        inputs = {
            name: torch.from_numpy(values).to(logprobs.device) for name, values in flat_inputs(spec, data).items()
        }
        chosen = [logprobs[share.targets] for share in shares]
        return loss_terms(spec, logprobs if sum(map(len, chosen)) == len(logprobs) else torch.cat(chosen), inputs)

    def _add(self, share: _Share, loss: float, values: np.ndarray, gradient: Tensor | None) -> None:
        sums, at = self._sums[share.member], 0
        for row in share.rows:
            targets = self._datum(row).targets
            sums.logprobs[row.datum] = values[at : at + targets.size].reshape(targets.shape).copy()
            at += targets.size
        sums.loss += loss
        sums.gradient = gradient if sums.gradient is None or gradient is None else sums.gradient + gradient

    def _datum(self, row: Row) -> Datum:
        return self._operations[row.member].batch.data[row.datum]


def _gradients(total: Tensor, groups: Sequence[StackedGroup], grouped: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    """Each member's gradient, (layout.size,); rows are independent, so each adapter gets its own member's only."""
    leaves = [leaf for group in groups for leaf in group.leaves()]
    found = iter(torch.autograd.grad(total, leaves, allow_unused=True))
    gradients: dict[int, Tensor] = {}
    for group, members in zip(groups, grouped, strict=True):
        stacked = group.gradient([next(found) for _ in group.leaves()])
        gradients |= dict(zip(members, stacked.unbind(), strict=True))
    return gradients


def _note(operation: PassOperation, count: int, sums: _Sums) -> None:
    """Add the pass's part to the operation; an error ends it."""
    if sums.error is not None:
        operation.outcome, operation.gradient = sums.error, None
        return
    first = operation.computed
    operation.logprobs += [sums.logprobs[number] for number in range(first, first + count) if number in sums.logprobs]
    operation.loss += sums.loss
    if sums.gradient is not None:
        # A copy of its own: the pass's gradients of all members are one tensor.
        operation.gradient = sums.gradient.clone() if operation.gradient is None else operation.gradient + sums.gradient
    operation.computed += count
