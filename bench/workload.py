"""Training data of the benchmarks: operations of random tokens, the same for every contestant."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from contracts.losses import LossName
from contracts.operations import Datum, LossSpec, TrainingBatch

RANK = 8
"""Rank of every adapter, on all linear layers of attention and MLP; benchmarks of training adapt the head, too."""
ALPHA = 32.0
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class OperationShape:
    """One ``forward_backward``: ``sequences`` of ``length`` tokens each."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the operation."""
        return self.sequences * self.length

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``4x128``, sequences x length. Raises ``ValueError``."""
        sequences, length = (int(part) for part in text.split("x"))
        return cls(sequences, length)


def token_block(shape: OperationShape, *, vocabulary: int, seed: int) -> NDArray[np.int64]:
    """Return random tokens, int64 (sequences, length + 1): position i predicts i + 1."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, vocabulary, size=(shape.sequences, shape.length + 1), dtype=np.int64)


def training_batch(block: NDArray[np.int64]) -> TrainingBatch:
    """Return a ``token_block`` as the engine's cross-entropy operation."""
    data = [
        Datum(
            tokens=np.ascontiguousarray(row[:-1]),
            targets=np.ascontiguousarray(row[1:]),
            inputs={"weights": np.ones(len(row) - 1, dtype=np.float32)},
        )
        for row in block
    ]
    return TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), data)
