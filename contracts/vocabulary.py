"""Conversion between a base model's tokens and text. ``engine.sampling.vocabulary`` reads it from the model's folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. ``extra`` holds what else templates read: ``tool_calls``, ``tool_call_id``, ``name``."""

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BaseVocabulary:
    """A base model's tokens and the functions of its tokenizer.

    - ``decode``: token ids to text, special tokens included. None when the model's folder has no tokenizer.
    - ``encode``: text to token ids, with the tokens that the tokenizer puts first. Raises ``InvalidRequest``.
    - ``chat``: a conversation, and the tools that the model is told of, to the prompt for the assistant's next turn. None
      when the base has no chat template. Raises ``InvalidRequest``.
    - ``takes_tools``: the template tells of tools, and has them called by JSON within ``<tool_call>``.
    - ``end_of_text_ids``: the tokenizer's own end of a text, which the model's ends may lack.
    - ``token_bytes``: a token's own bytes, None where they are unknown. Several tokens can make one character.
    - ``longest_token``: characters of the longest token. A text of more than a context of such tokens cannot fit.
    """

    end_of_sequence_ids: frozenset[int]
    decode: Callable[[list[int]], str] | None
    encode: Callable[[str], list[int]] | None = None
    chat: Callable[[Sequence[ChatMessage], Sequence[Mapping[str, Any]]], list[int]] | None = None
    takes_tools: bool = False
    special_ids: frozenset[int] = frozenset()
    end_of_text_ids: frozenset[int] = frozenset()
    longest_token: int = 256
    token_bytes: Callable[[int], bytes | None] | None = None
