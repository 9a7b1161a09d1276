"""One fused forward (and backward) over sequences of many adapters.

Sequences are sorted by length into micro-batches under a token budget, right-padded: attention is causal, so padding
changes no real position. Rows of one adapter stand together, so that each adapter is one segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.contracts.operations import ForwardBackwardOutput, TrainingBatch
from engine.training.base import BaseModel
from engine.training.lora import AdapterSegment, LoraWeights
from engine.training.losses import compute_loss
from engine.training.target_logprobs import target_logprobs

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
    """What came of a member; ``gradients`` (in the order of ``LoraWeights.flat()``) only when it may be accumulated."""

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
    tokens: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class FusedPass:
    """Runs the members, no two of which share an adapter."""

    def __init__(self, base: BaseModel, members: Sequence[PassMember], *, token_budget: int) -> None:
        self._base = base
        self._members = members
        self._token_budget = token_budget
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
                with torch.set_grad_enabled(backward):
                    self._run_micro_batch(micro_batch, backward=backward)
        return [self._result(place) for place in range(len(self._members))]

    def _run_micro_batch(self, rows: list[_Row], *, backward: bool) -> None:
        rows = sorted(rows, key=lambda row: (row.member, row.datum))
        device = self._base.device
        hidden = self._hidden_states(rows)
        logprobs = target_logprobs(
            self._base,
            hidden,
            token_segments=self._segments(rows, by_tokens=True),
            targets=[torch.from_numpy(self._datum(row).targets.copy()) for row in rows],
        )
        total: Tensor | None = None
        counted: list[int] = []
        at = 0
        for place, group in _by_member(rows):
            count = sum(self._datum(row).targets.size for row in group)
            flat = logprobs[at : at + count]
            at += count
            loss = self._member_loss(place, group, flat, device)
            if loss is not None and backward:
                total = loss if total is None else total + loss
                counted.append(place)
        if total is not None:
            self._backward(total, counted)

    def _hidden_states(self, rows: list[_Row]) -> Tensor:
        """Hidden states (real positions, hidden) of the rows, padding left out."""
        longest = max(row.length for row in rows)
        tokens = np.zeros((len(rows), longest), dtype=np.int64)
        for place, row in enumerate(rows):
            tokens[place, : row.length] = self._datum(row).tokens
        with self._base.adapters(self._segments(rows, by_tokens=False)):
            states = self._base.hidden_states(torch.from_numpy(tokens).to(self._base.device))
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

    def _member_loss(self, place: int, rows: list[_Row], logp: Tensor, device: torch.device) -> Tensor | None:
        """Note the member's logprobs and loss; the loss to differentiate, or None once the member has failed."""
        progress, member = self._progress[place], self._members[place]
        values = logp.detach().cpu().numpy()
        at = 0
        for row in rows:
            targets = self._datum(row).targets
            progress.logprobs[row.datum] = values[at : at + targets.size].reshape(targets.shape).copy()
            at += targets.size
        progress.tokens += sum(row.length for row in rows)
        if progress.error is not None:
            return None
        try:
            loss = compute_loss(member.batch.loss, logp, self._inputs(rows, device))
        except InvalidRequest as error:
            progress.error = error
            return None
        value = float(loss.detach())
        if not np.isfinite(value) or not np.isfinite(values).all():
            progress.error = InvalidRequest("the loss is not finite: lower the weights, advantages or learning rate")
            return None
        progress.loss += value
        return loss

    def _inputs(self, rows: list[_Row], device: torch.device) -> dict[str, Tensor]:
        """Each loss input, flat over the rows. Raises ``InvalidRequest`` when only some data carry one."""
        names = set(self._datum(rows[0]).inputs)
        if any(set(self._datum(row).inputs) != names for row in rows):
            raise InvalidRequest("loss_fn_inputs: every datum of a request must carry the same inputs")
        return {
            name: torch.from_numpy(
                np.concatenate([self._datum(row).inputs[name].astype(np.float32).ravel() for row in rows])
            ).to(device)
            for name in names
        }

    def _backward(self, total: Tensor, places: list[int]) -> None:
        """Gradients of the summed losses; rows are independent, so each adapter gets its own member's only."""
        parameters = [self._members[place].weights.flat() for place in places]
        flat = [parameter for group in parameters for parameter in group]
        gradients = iter(torch.autograd.grad(total, flat, allow_unused=True))
        for place, group in zip(places, parameters, strict=True):
            found = [torch.zeros_like(parameter) if (g := next(gradients)) is None else g for parameter in group]
            progress = self._progress[place]
            if progress.gradients is None:
                progress.gradients = found
            else:
                torch._foreach_add_(progress.gradients, found)

    def _result(self, place: int) -> MemberResult:
        progress, member = self._progress[place], self._members[place]
        if progress.error is not None:
            return MemberResult(progress.error)
        logprobs = [row for row in progress.logprobs if row is not None]
        if len(logprobs) != len(member.batch.data):
            return MemberResult(EngineFailure("the pass left out a sequence"))
        if progress.gradients is not None:
            norms = torch.stack(torch._foreach_norm(progress.gradients))
            if not torch.isfinite(norms).all():
                return MemberResult(InvalidRequest("the gradient is not finite: lower the weights or advantages"))
        metrics = {"loss:sum": progress.loss, "tokens:sum": float(progress.tokens)}
        return MemberResult(ForwardBackwardOutput(logprobs, metrics), progress.gradients)

    def _datum(self, row: _Row):  # type: ignore[no-untyped-def]
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
