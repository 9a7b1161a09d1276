"""One fused forward (and backward) of a micro-batch: the sequences of several adapters in one call of the base model.

Members whose adapters have the same layout are neighbours in a micro-batch, and so are the rows of one member. Computing a
micro-batch changes no state. The pass that cut the micro-batch notes the result, maybe in another process.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from contracts.errors import WeftError
from contracts.operations import Datum, LossSpec
from engine.model.base import BaseModel
from engine.model.device import device_errors, is_lack_of_memory
from engine.training.losses import flat_inputs, loss_terms
from engine.training.low_rank import LowRankPlan, StackedGroup, Stopwatch
from engine.training.micro_batch import Member, PackedRow, padded_tokens, real_positions, token_matrix
from engine.training.target_logprobs import gather_logprobs, target_logprobs

log = logging.getLogger(__name__)

_LARGEST_POWER = 126
"""Power of two of the largest factor by which a loss is multiplied: it is finite in float32, and so is its inverse."""


@dataclass(frozen=True, slots=True)
class MemberSlice:
    """A member's part of one micro-batch: its rows, and the slice of its targets among all targets of the micro-batch."""

    member: int
    rows: list[PackedRow]
    targets: slice


@dataclass(frozen=True, slots=True)
class MicroBatchOutput:
    """Output of a computed micro-batch.

    - ``losses[i]`` and ``is_sound[i]``: loss of ``slices[i]``, and whether the loss and its logprobs are finite.
    - ``logprobs``: float32 (targets,) of all targets, in the order of ``slices``.
    - ``gradients``: float32 (layout.size,) each, by member; empty without a backward pass.
    """

    slices: list[MemberSlice]
    losses: list[float]
    is_sound: list[bool]
    logprobs: np.ndarray
    gradients: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds of one micro-batch, by part. Micro-batches run at the same time, so their sum may exceed the elapsed time."""

    low_rank: Stopwatch = field(default_factory=Stopwatch)
    loss: Stopwatch = field(default_factory=Stopwatch)
    all: Stopwatch = field(default_factory=Stopwatch)


@dataclass(frozen=True, slots=True)
class MicroBatchResult:
    """Outcome of a micro-batch: its output, or None when the computation failed, and its clocks.

    ``lacks_memory`` tells that it failed because the device had no memory for so many positions.
    """

    output: MicroBatchOutput | None
    clocks: Clocks
    lacks_memory: bool = False


class FusedMicroBatches:
    """Computes micro-batches of ``members``, looked up by a row's ``member``. For any thread, several at once."""

    def __init__(self, base: BaseModel, members: Sequence[Member] | Mapping[int, Member]) -> None:
        self.members = members
        self._base = base

    def compute(self, rows: list[PackedRow], *, backward: bool) -> MicroBatchResult:
        """Run one fused forward (and backward) of ``rows``. A failure is logged and returned as a result without output.

        Raises ``DeviceFailed``.
        """
        clocks = Clocks()
        try:
            with (
                self._base.turns.turn(),
                torch.set_grad_enabled(backward),
                clocks.all.measure(),
                device_errors(),
            ):
                return MicroBatchResult(self._output(rows, clocks, backward=backward), clocks)
        except (RuntimeError, MemoryError, WeftError) as error:
            name, positions = self._base.facts.name, padded_tokens(rows)
            log.exception("micro-batch failed base=%s rows=%d positions=%d", name, len(rows), positions)
            return MicroBatchResult(None, clocks, lacks_memory=is_lack_of_memory(error))

    def _output(self, rows: list[PackedRow], clocks: Clocks, *, backward: bool) -> MicroBatchOutput:
        by_member: dict[int, list[PackedRow]] = {}
        for row in rows:
            by_member.setdefault(row.member, []).append(row)
        layouts = {member: self.members[member].weights.layout.key for member in by_member}
        grouped = [[m for m in by_member if layouts[m] == key] for key in dict.fromkeys(layouts.values())]
        groups = [self._stack(members, trains=backward) for members in grouped]
        slices = self._slices([member for members in grouped for member in members], by_member)
        logprobs = self._logprobs(groups, grouped, by_member, clocks)
        with clocks.loss.measure():
            losses = self._losses(slices, logprobs)
            loss_values = losses.detach().tolist()
            logprob_values = logprobs.detach().cpu().numpy()
        is_sound = [
            math.isfinite(loss) and bool(np.isfinite(logprob_values[part.targets]).all())
            for part, loss in zip(slices, loss_values, strict=True)
        ]
        gradients: dict[int, Tensor] = {}
        if backward and any(is_sound):
            total = losses.sum() if all(is_sound) else losses[torch.tensor(is_sound, device=losses.device)].sum()
            if self._base.dtype is torch.float16:
                gradients = _scaled_gradients(total, logprobs, slices, groups, grouped)
            else:
                gradients = _gradients(total, None, groups, grouped)
        return MicroBatchOutput(slices, loss_values, is_sound, logprob_values, gradients)

    def _stack(self, members: Sequence[int], *, trains: bool) -> StackedGroup:
        weights = [self.members[member].weights for member in members]
        return StackedGroup(weights[0].layout, weights, self._base.dtype, trains=trains)

    def _logprobs(
        self,
        groups: list[StackedGroup],
        grouped: list[list[int]],
        by_member: dict[int, list[PackedRow]],
        clocks: Clocks,
    ) -> Tensor:
        """Return log-probabilities, float32 (targets,), of all targets of the rows, members in the order of ``grouped``."""
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

    def _real_positions(self, rows: list[PackedRow], plan: LowRankPlan, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Run ``forward`` on the rows and return its result without padding, (real positions, features)."""
        with self._base.adapters(plan):
            states = forward(token_matrix(rows, self.members).to(self._base.device))
        return real_positions(states, rows)

    def _slices(self, members: Sequence[int], by_member: dict[int, list[PackedRow]]) -> list[MemberSlice]:
        slices, at = [], 0
        for member in members:
            count = sum(self._datum(row).targets.size for row in by_member[member])
            slices.append(MemberSlice(member, by_member[member], slice(at, at + count)))
            at += count
        return slices

    def _losses(self, slices: Sequence[MemberSlice], logprobs: Tensor) -> Tensor:
        """Return each slice's loss, (slices,). Members with one loss and config are computed together."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, part in enumerate(slices):
            spec = self.members[part.member].loss
            alike.setdefault((spec.name, *sorted(spec.config.items())), []).append(number)
        losses: list[Tensor | None] = [None] * len(slices)
        for numbers in alike.values():
            parts = [slices[number] for number in numbers]
            terms = self._terms(self.members[parts[0].member].loss, parts, logprobs)
            sizes = [part.targets.stop - part.targets.start for part in parts]
            for number, values in zip(numbers, torch.split(terms, sizes), strict=True):
                losses[number] = values.sum()
        return torch.stack([loss for loss in losses if loss is not None])

    def _terms(self, spec: LossSpec, slices: Sequence[MemberSlice], logprobs: Tensor) -> Tensor:
        data = [self._datum(row) for part in slices for row in part.rows]
        inputs = {
            name: torch.from_numpy(values).to(logprobs.device) for name, values in flat_inputs(spec, data).items()
        }
        chosen = [logprobs[part.targets] for part in slices]
        return loss_terms(spec, logprobs if sum(map(len, chosen)) == len(logprobs) else torch.cat(chosen), inputs)

    def _datum(self, row: PackedRow) -> Datum:
        return self.members[row.member].data[row.datum]


def _scaled_gradients(
    total: Tensor,
    logprobs: Tensor,
    slices: Sequence[MemberSlice],
    groups: Sequence[StackedGroup],
    grouped: Sequence[Sequence[int]],
) -> dict[int, Tensor]:
    """Return each member's gradient of ``total``, float32 (layout.size,), computed with slopes that float16 holds.

    Each member's loss is multiplied by the power of two at which its steepest slope is 1 to 2, and its gradient divided by
    the same. That is exact, and changes no other member. Micikevicius et al. 2018, "Mixed Precision Training".
    """
    (slopes,) = torch.autograd.grad(total, logprobs, retain_graph=True)
    factors: dict[int, float] = {}
    for part in slices:
        steepest = float(slopes[part.targets].abs().max()) if part.targets.stop > part.targets.start else 0.0
        power = 1 - math.frexp(steepest)[1] if 0 < steepest < math.inf else 0
        # A slope below the smallest normal number of float32 stays below 1: its factor is to be finite, too.
        factors[part.member] = math.ldexp(1.0, min(power, _LARGEST_POWER))
        slopes[part.targets] *= factors[part.member]
    found = _gradients(logprobs, slopes, groups, grouped)
    return {member: gradient / factors[member] for member, gradient in found.items()}


def _gradients(
    total: Tensor, slopes: Tensor | None, groups: Sequence[StackedGroup], grouped: Sequence[Sequence[int]]
) -> dict[int, Tensor]:
    """Return each member's gradient of ``total``, or of its product with ``slopes``, float32 (layout.size,).

    Rows do not depend on each other. So the gradient of the sum with respect to one adapter is the gradient of its own
    member's loss.
    """
    leaves = [leaf for group in groups for leaf in group.leaves()]
    found = iter(torch.autograd.grad(total, leaves, slopes, allow_unused=True))
    gradients: dict[int, Tensor] = {}
    for group, members in zip(groups, grouped, strict=True):
        stacked = group.gradient([next(found) for _ in group.leaves()])
        gradients |= dict(zip(members, stacked.unbind(), strict=True))
    return gradients
