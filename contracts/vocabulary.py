"""What a base model's tokens and text have to do with each other; how that is read is ``engine.sampling.vocabulary``'s."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class BaseVocabulary:
    """``decode`` turns token ids into their text, special tokens included; None when the folder has no tokenizer.

    ``encode`` makes tokens of a text, with what the tokenizer puts before one; ``chat`` makes the prompt that asks for the
    assistant's next turn, and is None when the base has no chat template. Both raise ``InvalidRequest``.
    """

    end_of_sequence_ids: frozenset[int]
    decode: Callable[[list[int]], str] | None
    encode: Callable[[str], list[int]] | None = None
    chat: Callable[[Sequence[ChatMessage]], list[int]] | None = None
    special_ids: frozenset[int] = frozenset()
