"""Cells of a matrix over a prompt: the tokens that a sample request wants scored, and their scores."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1
"""Token of a cell that asks for nothing."""


@dataclass(frozen=True, slots=True)
class PromptCells:
    """A matrix (P - 1, ``columns``) for a prompt of P tokens. Row i is about the prompt's position i + 1.

    - ``values``: the whole matrix, or with ``crow`` the listed cells (N,), row by row. Tokens are int64 and ``NO_TOKEN`` asks for
      nothing; logprobs are float32, 0 where nothing was asked for.
    - ``crow`` int64 (P,) and ``col`` int64 (N,): compressed sparse rows. None for a dense matrix.
    """

    values: np.ndarray
    columns: int
    crow: np.ndarray | None = None
    col: np.ndarray | None = None

    @property
    def positions(self) -> NDArray[np.int64]:
        """Prompt position of each value in order, int64 (N,)."""
        if self.crow is None:
            return np.repeat(np.arange(1, len(self.values) + 1), self.columns)
        return np.repeat(np.arange(1, len(self.crow)), np.diff(self.crow))

    def wanted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return positions and tokens, int64 (M,) each, of the cells that ask for a score, positions ascending."""
        tokens = self.values.ravel()
        asks = tokens != NO_TOKEN
        return self.positions[asks], tokens[asks]

    def scored(self, logprobs: NDArray[np.float32]) -> "PromptCells":
        """Return the matrix of the same layout with ``logprobs`` (M,) of the ``wanted`` cells."""
        values = np.zeros(self.values.shape, np.float32)
        values.reshape(-1)[self.values.ravel() != NO_TOKEN] = logprobs
        return PromptCells(values, self.columns, self.crow, self.col)

    def scores_of(self, scored: "PromptCells") -> NDArray[np.float32]:
        """Return the logprobs (M,) of the ``wanted`` cells in a matrix that ``scored`` made."""
        found: NDArray[np.float32] = scored.values.ravel()[self.values.ravel() != NO_TOKEN]
        return found


@dataclass(frozen=True, slots=True)
class PromptAltTokens:
    """Draws at a prompt's positions after the first: ``tokens`` int64 and ``logprobs`` float32, both (P - 1, k)."""

    tokens: np.ndarray
    logprobs: np.ndarray
