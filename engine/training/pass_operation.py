"""A ``forward`` or ``forward_backward`` operation on its way through one or several passes."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from engine.contracts.errors import EngineFailure, WeftError
from engine.contracts.ids import RunId
from engine.contracts.operations import ForwardBackwardOutput, TrainingBatch


@dataclass(frozen=True, slots=True)
class PassItem:
    """One ``forward`` (``backward`` false) or ``forward_backward`` operation of a run."""

    run: RunId
    batch: TrainingBatch
    backward: bool


@dataclass(slots=True)
class PassOperation:
    """What is computed of an item so far. Its gradient stays its own until all of it is there.

    ``gradient`` is float32 (layout.size,). ``outcome`` is None until the operation has ended, well or not.
    """

    run: RunId
    batch: TrainingBatch
    backward: bool
    computed: int = 0
    loss: float = 0.0
    gradient: Tensor | None = None
    outcome: ForwardBackwardOutput | WeftError | None = None
    logprobs: list[np.ndarray] = field(default_factory=list)

    @property
    def lengths_left(self) -> list[int]:
        """Tokens of each sequence still to compute, in order."""
        return [len(datum.tokens) for datum in self.batch.data[self.computed :]]

    def output(self) -> ForwardBackwardOutput | WeftError:
        """The result once every sequence is computed."""
        if len(self.logprobs) != len(self.batch.data):
            return EngineFailure("the pass left out a sequence")
        tokens = sum(len(datum.tokens) for datum in self.batch.data)
        return ForwardBackwardOutput(self.logprobs, {"loss:sum": self.loss, "tokens:sum": float(tokens)})


@dataclass(frozen=True, slots=True)
class PassPiece:
    """The next ``sequences`` sequences of ``operation`` belong to the pass."""

    operation: PassOperation
    sequences: int


@dataclass(frozen=True, slots=True)
class PassReport:
    """What a pass did. Times are seconds; ``base`` is all that is neither low-rank nor loss."""

    adapters: int
    sequences: int
    tokens: int
    padded_tokens: int
    seconds: float
    low_rank_seconds: float
    loss_seconds: float

    @property
    def padding_share(self) -> float:
        """Padded positions among all that were computed."""
        return (self.padded_tokens - self.tokens) / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def base_seconds(self) -> float:
        """Time of the frozen base, and of what holds the pass together."""
        return self.seconds - self.low_rank_seconds - self.loss_seconds
