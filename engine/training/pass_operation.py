"""Progress of a ``forward`` or ``forward_backward`` operation, whose sequences may be computed in several passes."""

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from contracts.custom_loss import read_custom_loss
from contracts.errors import EngineFailure, WeftError
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, LossSpec, TrainingBatch
from engine.training.custom_loss import Evaluated, LossMeter, evaluate
from engine.training.policy_record import policy_metrics, weight_metrics


@dataclass(frozen=True, slots=True)
class PassItem:
    """One ``forward`` (``backward`` false) or ``forward_backward`` operation of a run."""

    run: RunId
    batch: TrainingBatch
    backward: bool


@dataclass(frozen=True, slots=True)
class PassPiece:
    """Part of an operation in one pass: ``sequences`` sequences of ``operation``, from number ``first`` on."""

    operation: "PassOperation"
    first: int
    sequences: int


@dataclass(frozen=True, slots=True)
class PieceResult:
    """Result of a piece: loss, logprobs of its sequences in order and gradient, or the ``error`` that ends the operation.

    ``gradient`` is float32 (layout.size,), None without a backward pass.
    """

    sequences: int
    loss: float = 0.0
    logprobs: list[np.ndarray] = field(default_factory=list)
    gradient: Tensor | None = None
    error: WeftError | None = None


@dataclass(slots=True)
class PassOperation:
    """State of an operation: how many of its sequences are computed, and their sums.

    - ``begun``: sequences that are in a pass or were in one. ``computed``: sequences whose results are added.
    - ``gradient``: float32 (layout.size,). It reaches the adapter only when the whole operation is computed.
    - ``outcome``: None until the operation has ended, well or not. Results that come after the end are ignored.

    A custom loss takes two rounds of passes: a forward for its logprobs, and after its evaluation the ``forward_backward`` of the
    linear loss that has its gradient. ``batch`` is then that of the linear loss.

    One thread changes the state, that of ``Trainer.finish``. Only ``begun`` and ``is_evaluating`` belong to the event loop.
    ``is_evaluating`` stays true: a loss is evaluated once.
    """

    run: RunId
    batch: TrainingBatch
    backward: bool
    begun: int = 0
    computed: int = 0
    is_checked: bool = False
    is_evaluating: bool = False
    loss: float = 0.0
    gradient: Tensor | None = None
    outcome: ForwardBackwardOutput | WeftError | None = None
    logprobs: list[np.ndarray] = field(default_factory=list)
    _early: dict[int, PieceResult] = field(default_factory=dict)
    _evaluated: Evaluated | None = None
    _logprobs: list[np.ndarray] = field(default_factory=list)

    @property
    def lengths_left(self) -> list[int]:
        """Lengths in tokens of the sequences that are in no pass yet, in order."""
        return [len(datum.tokens) for datum in self.batch.data[self.begun :]]

    def next_piece(self, sequences: int) -> PassPiece:
        """Return a piece of the next ``sequences`` sequences and count them as begun."""
        first, self.begun = self.begun, self.begun + sequences
        return PassPiece(self, first, sequences)

    def note(self, piece: PassPiece, result: PieceResult) -> None:
        """Add the result of a piece. An error ends the operation.

        Passes may end in any order; results are added in the order of the pieces.
        """
        if self.outcome is not None:
            return
        if result.error is not None:
            self.end(result.error)
            return
        self._early[piece.first] = result
        while (found := self._early.pop(self.computed, None)) is not None:
            self._add(found)

    def end(self, outcome: ForwardBackwardOutput | WeftError) -> None:
        """Set the outcome and drop the gradient and the results not added yet."""
        self.outcome, self.gradient = outcome, None
        self._early.clear()

    def _add(self, result: PieceResult) -> None:
        self.logprobs += result.logprobs
        self.loss += result.loss
        if result.gradient is not None:
            # Cloned: the result is a view of one tensor with the gradients of all members of the pass.
            known = self.gradient
            self.gradient = result.gradient.clone() if known is None else known + result.gradient
        self.computed += result.sequences

    @property
    def runs_backward(self) -> bool:
        """True if the passes now compute gradients."""
        return self.backward and self.batch.loss.name is not LossName.CUSTOM

    @property
    def awaits_loss(self) -> bool:
        """True once the logprobs of a custom loss are known, and until it is evaluated."""
        is_custom = self.batch.loss.name is LossName.CUSTOM and self._evaluated is None
        return is_custom and self.outcome is None and self.computed == len(self.batch.data)

    def evaluate(self, meter: LossMeter | None = None) -> Evaluated:
        """Compute the custom loss, and count its work. Changes nothing else; blocking. Raises ``InvalidRequest``."""
        return evaluate(read_custom_loss(self.batch.loss.loss_id), self.batch.data, self.logprobs, meter)

    def note_evaluated(self, found: Evaluated | WeftError) -> None:
        """Note the loss. With ``backward``, begin again with the linear loss. An error ends the operation.

        Ignored once the operation has ended.
        """
        if self.outcome is not None:
            return
        if isinstance(found, WeftError):
            self.end(found)
            return
        self._evaluated = found
        if not self.backward:
            return
        data = [
            replace(datum, inputs={"weights": -slope})
            for datum, slope in zip(self.batch.data, found.slopes, strict=True)
        ]
        self._logprobs, self.logprobs, self.computed = self.logprobs, [], 0
        self.batch = TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), data)
        # Last: from now on the event loop plans passes of it.
        self.begun = 0

    @property
    def is_complete(self) -> bool:
        """True once the results of all sequences are added, and the custom loss, if it is one, is evaluated."""
        return self.computed == len(self.batch.data) and not self.awaits_loss

    def output(self) -> ForwardBackwardOutput | WeftError:
        """Return the operation's result; an ``EngineFailure`` when a sequence has no logprobs."""
        if len(self.logprobs) != len(self.batch.data):
            return EngineFailure("the pass left out a sequence")
        tokens = sum(len(datum.tokens) for datum in self.batch.data)
        metrics = {"loss:sum": self.loss, "tokens:sum": float(tokens)}
        if self._evaluated is not None:
            metrics |= {"loss:sum": self._evaluated.loss, **self._evaluated.metrics}
            return ForwardBackwardOutput(self._logprobs or self.logprobs, metrics)
        metrics |= policy_metrics(self.batch.loss, self.batch.data, self.logprobs) | weight_metrics(self.batch)
        return ForwardBackwardOutput(self.logprobs, metrics)
