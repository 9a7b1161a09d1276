"""Reads a base model's tokenizer, chat template and end-of-sequence tokens from its folder, without its weights."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import InvalidRequest
from contracts.vocabulary import BaseVocabulary, ChatMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_TOLD = 300
"""Characters of a chat template's error that are told: it may hold what was sent."""
_BYTE_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


def _byte_level_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level BPE, by GPT-2's ``bytes_to_unicode``.

    A printable byte of Latin-1 is its own letter. The others are the letters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + place): byte for place, byte in enumerate(rest)}}


_BYTES_OF_LETTERS = _byte_level_letters()


def read_vocabulary(path: Path) -> BaseVocabulary:
    """Return the vocabulary of the Hugging Face model folder ``path``; takes seconds.

    Without a usable tokenizer only the end-of-sequence tokens are known. Raises ``InvalidRequest`` for a config that
    cannot be read.
    """
    ends = _end_of_sequence_ids(path)
    tokenizer = _tokenizer(path)
    if tokenizer is None:
        return BaseVocabulary(ends, None)
    texts = _Texts(tokenizer)
    return BaseVocabulary(
        end_of_sequence_ids=ends,
        decode=texts.decode,
        encode=texts.encode,
        chat=texts.chat if tokenizer.chat_template else None,
        takes_tools=_takes_tools(tokenizer),
        special_ids=_special_ids(tokenizer) | ends,
        end_of_text_ids=frozenset() if tokenizer.eos_token_id is None else frozenset({int(tokenizer.eos_token_id)}),
        longest_token=max(map(len, tokenizer.get_vocab())),
        token_bytes=texts.token_bytes,
    )


def _end_of_sequence_ids(path: Path) -> frozenset[int]:
    """Return the tokens that end a text, by the generation config or else the model's."""
    # Imported here: transformers imports torch, which a process that only imports this module must not load.
    from transformers import AutoConfig, GenerationConfig

    try:
        configs = [AutoConfig.from_pretrained(str(path), local_files_only=True).get_text_config()]
        if (path / "generation_config.json").is_file():
            configs.insert(0, GenerationConfig.from_pretrained(str(path), local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequest(f"the config files of {path} cannot be read: {error}") from error
    for config in configs:
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else [found])
    return frozenset()


def _tokenizer(path: Path) -> "PreTrainedTokenizerBase | None":
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError):
        return None
    # A folder without tokenizer files can give an empty tokenizer, with which no stop string would ever match.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def _special_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Return the ids of special tokens, those that have no role of a name in the tokenizer included, as ends of turns."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))


def _takes_tools(tokenizer: "PreTrainedTokenizerBase") -> bool:
    templates = tokenizer.chat_template or ""
    text = " ".join(templates.values()) if isinstance(templates, dict) else str(templates)
    # Some families write each argument as an XML element of its own within the same marks.
    return re.search(r"\btools\b", text) is not None and "<tool_call>" in text and "<function=" not in text


class _Texts:
    """Encoding and decoding by one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token, by its raw form: that of byte-level BPE, or ``<0xE2>`` of byte fallback."""
        raw = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(raw, str):
            return None
        if (byte := _BYTE_FALLBACK.fullmatch(raw)) is not None:
            found = bytes.fromhex(byte[1])
        elif all(letter in _BYTES_OF_LETTERS for letter in raw):
            found = bytes(_BYTES_OF_LETTERS[letter] for letter in raw)
        else:
            return None
        # Another kind of tokenizer may spell a token with the same letters.
        return found if found.decode(errors="replace") == self.decode([token]) else None

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        turns = [{"role": message.role, "content": message.content, **message.extra} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tools=[dict(tool) for tool in tools] or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # Templates check little of what they read: a field of another type fails in the midst of an expression.
            told = str(error)[:_LONGEST_TOLD]
            raise InvalidRequest(f"messages or tools do not fit this base model's chat template: {told}") from error
        # The template itself adds the tokens that begin a conversation.
        return list(self._tokenizer.encode(str(text), add_special_tokens=False))
