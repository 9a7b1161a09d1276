"""Progress of a ``forward`` or ``forward_backward`` operation, whose sequences may be computed in several passes."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from contracts.errors import EngineFailure, WeftError
from contracts.ids import RunId
from contracts.operations import ForwardBackwardOutput, TrainingBatch
from engine.training.policy_record import policy_metrics


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
    """

    run: RunId
    batch: TrainingBatch
    backward: bool
    begun: int = 0
    computed: int = 0
    is_checked: bool = False
    loss: float = 0.0
    gradient: Tensor | None = None
    outcome: ForwardBackwardOutput | WeftError | None = None
    logprobs: list[np.ndarray] = field(default_factory=list)
    _early: dict[int, PieceResult] = field(default_factory=dict)

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
    def is_complete(self) -> bool:
        """True once the results of all sequences are added."""
        return self.computed == len(self.batch.data)

    def output(self) -> ForwardBackwardOutput | WeftError:
        """Return the operation's result; an ``EngineFailure`` when a sequence has no logprobs."""
        if len(self.logprobs) != len(self.batch.data):
            return EngineFailure("the pass left out a sequence")
        tokens = sum(len(datum.tokens) for datum in self.batch.data)
        metrics = {"loss:sum": self.loss, "tokens:sum": float(tokens)}
        metrics |= policy_metrics(self.batch.loss, self.batch.data, self.logprobs)
        return ForwardBackwardOutput(self.logprobs, metrics)
