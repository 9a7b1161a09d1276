"""Conversion between a base model's tokens and text. ``engine.sampling.vocabulary`` reads it from the model's folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class BaseVocabulary:
    """A base model's tokens and the functions of its tokenizer.

    - ``decode``: token ids to text, special tokens included. None when the model's folder has no tokenizer.
    - ``encode``: text to token ids, with the tokens that the tokenizer puts first. Raises ``InvalidRequest``.
    - ``chat``: a conversation to the prompt for the assistant's next turn. None when the base has no chat template. Raises
      ``InvalidRequest``.
    - ``longest_token``: characters of the longest token. A text of more than a context of such tokens cannot fit.
    """

    end_of_sequence_ids: frozenset[int]
    decode: Callable[[list[int]], str] | None
    encode: Callable[[str], list[int]] | None = None
    chat: Callable[[Sequence[ChatMessage]], list[int]] | None = None
    special_ids: frozenset[int] = frozenset()
    longest_token: int = 256
