"""Conversion of Tinker's JSON ``ModelInput`` to token ids; images and audio are refused."""

import numpy as np

from api.wire.tinker_requests import ModelInput
from api.wire.token_ids import array_of, joined
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest


def tokens_of(model_input: ModelInput, field: str, facts: BaseModelFacts) -> np.ndarray:
    """Return the token ids of the chunks as int64 (N,).

    Raises ``InvalidRequest`` naming ``field`` for images and audio, and for ids beyond 64 bits.
    """
    pieces = []
    for chunk in model_input.chunks:
        if chunk.tokens is None:
            raise text_only(field, facts)
        pieces.append(array_of(chunk.tokens, field))
    return joined(pieces)


def text_only(field: str, facts: BaseModelFacts) -> InvalidRequest:
    """Return the refusal of images and audio."""
    return InvalidRequest(f"{field}: base model {facts.name} takes text only; send encoded_text chunks")
