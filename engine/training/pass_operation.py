"""A ``forward`` or ``forward_backward`` operation on its way through one or several passes."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from contracts.errors import EngineFailure, WeftError
from contracts.ids import RunId
from contracts.operations import ForwardBackwardOutput, TrainingBatch


@dataclass(frozen=True, slots=True)
class PassItem:
    """One ``forward`` (``backward`` false) or ``forward_backward`` operation of a run."""

    run: RunId
    batch: TrainingBatch
    backward: bool


@dataclass(frozen=True, slots=True)
class PassPiece:
    """``sequences`` sequences of ``operation`` from number ``first`` on belong to the pass."""

    operation: "PassOperation"
    first: int
    sequences: int


@dataclass(frozen=True, slots=True)
class PieceResult:
    """What a pass made of a piece: logprobs of its sequences in order, or the ``error`` that ends the operation.

    ``gradient`` is float32 (layout.size,), None where nothing is trained.
    """

    sequences: int
    loss: float = 0.0
    logprobs: list[np.ndarray] = field(default_factory=list)
    gradient: Tensor | None = None
    error: WeftError | None = None


@dataclass(slots=True)
class PassOperation:
    """What is computed of an item so far. Its gradient stays its own until all of it is there.

    ``begun`` sequences are in passes, ``computed`` of them are noted. ``gradient`` is float32 (layout.size,). ``outcome`` is
    None until the operation has ended, well or not; what passes still bring then is left alone.
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
        """Tokens of each sequence that is in no pass yet, in order."""
        return [len(datum.tokens) for datum in self.batch.data[self.begun :]]

    def next_piece(self, sequences: int) -> PassPiece:
        """The next sequences, which are in a pass from now on."""
        first, self.begun = self.begun, self.begun + sequences
        return PassPiece(self, first, sequences)

    def note(self, piece: PassPiece, result: PieceResult) -> None:
        """Add what came of a piece; passes may end in any order, pieces add up in their own. An error ends the operation."""
        if self.outcome is not None:
            return
        if result.error is not None:
            self.end(result.error)
            return
        self._early[piece.first] = result
        while (found := self._early.pop(self.computed, None)) is not None:
            self._add(found)

    def end(self, outcome: ForwardBackwardOutput | WeftError) -> None:
        """It is over; what it holds is let go."""
        self.outcome, self.gradient = outcome, None
        self._early.clear()

    def _add(self, result: PieceResult) -> None:
        self.logprobs += result.logprobs
        self.loss += result.loss
        if result.gradient is not None:
            # A copy of its own: the pass's gradients of all members are one tensor.
            known = self.gradient
            self.gradient = result.gradient.clone() if known is None else known + result.gradient
        self.computed += result.sequences

    @property
    def is_complete(self) -> bool:
        """Whether every sequence is noted."""
        return self.computed == len(self.batch.data)

    def output(self) -> ForwardBackwardOutput | WeftError:
        """The result once every sequence is computed."""
        if len(self.logprobs) != len(self.batch.data):
            return EngineFailure("the pass left out a sequence")
        tokens = sum(len(datum.tokens) for datum in self.batch.data)
        return ForwardBackwardOutput(self.logprobs, {"loss:sum": self.loss, "tokens:sum": float(tokens)})
