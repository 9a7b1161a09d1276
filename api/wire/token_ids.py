"""Conversion of the wire's token ids to arrays, and their check against the base model's vocabulary."""

from collections.abc import Sequence

import numpy as np

from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest


def array_of(tokens: Sequence[int], field: str) -> np.ndarray:
    """Return token ids as int64 (N,). Raises ``InvalidRequest`` naming ``field`` for one beyond 64 bits."""
    try:
        return np.asarray(tokens, dtype=np.int64)
    except OverflowError as error:
        raise InvalidRequest(f"{field}: a token id is out of range; send ids of the base model's vocabulary") from error


def check_token_ids(tokens: np.ndarray, field: str, facts: BaseModelFacts) -> None:
    """Raise ``InvalidRequest`` unless every id is in the vocabulary."""
    if tokens.size and (tokens.min() < 0 or tokens.max() >= facts.vocabulary_size):
        raise InvalidRequest(
            f"{field} has token ids outside the vocabulary of {facts.name}: they must be 0 to {facts.vocabulary_size - 1}"
        )


def joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Return the pieces of a sequence as one int64 array (N,)."""
    return np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, dtype=np.int64)
