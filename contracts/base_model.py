"""Facts about a base model that can be read from its ``config.json``, without torch and without loading it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class BaseModelFacts:
    """A served base model.

    ``context_length`` and ``vocabulary_size`` count tokens. Clients see ``path`` only when it is also the
    ``tokenizer_id``.
    """

    name: str
    path: Path
    architecture: str
    context_length: int
    vocabulary_size: int
    tokenizer_id: str | None

    def most_new_tokens(self, prompt_length: int) -> int:
        """Return the most tokens that can be drawn after a prompt, below 1 for a prompt beyond the context.

        The last drawn token is not computed on, so it needs no place: a prompt of the whole context has one new token.
        """
        return self.context_length - prompt_length + 1


ClassDefaults = Callable[[Path], Mapping[str, Any]]
"""Reads a model folder's config with what its class has where the file leaves it out."""
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


def read_base_model_facts(
    name: str, path: Path, tokenizer_id: str | None, defaults: ClassDefaults | None = None
) -> BaseModelFacts:
    """Read the facts of a Hugging Face model directory. ``defaults`` is asked where ``config.json`` leaves one out.

    Raises ``InvalidRequest`` naming what is missing: ``config.json``, the context length or the vocabulary size.
    """
    config_path = path / "config.json"
    if not config_path.is_file():
        raise InvalidRequest(f"base model {name!r}: {path} holds no config.json; give a Hugging Face model directory")
    try:
        config = json.loads(config_path.read_text())
    except ValueError as error:
        raise InvalidRequest(f"base model {name!r}: config.json is not valid JSON ({error})") from error
    text = {**config, **config.get("text_config", {})}
    context, vocabulary = _context_length(text), _number(text, "vocab_size")
    if defaults is not None and (context is None or vocabulary is None):
        whole = defaults(path)
        context, vocabulary = context or _context_length(whole), vocabulary or _number(whole, "vocab_size")
    if context is None:
        raise InvalidRequest(
            f"base model {name!r}: config.json gives no context length (looked for {', '.join(_CONTEXT_KEYS)})"
        )
    if vocabulary is None:
        raise InvalidRequest(f"base model {name!r}: config.json gives no vocab_size")
    architecture = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
    return BaseModelFacts(
        name=name,
        path=path,
        architecture=architecture,
        context_length=context,
        vocabulary_size=vocabulary,
        tokenizer_id=tokenizer_id,
    )


def _context_length(text: Mapping[str, Any]) -> int | None:
    return next((found for key in _CONTEXT_KEYS if (found := _number(text, key)) is not None), None)


def _number(text: Mapping[str, Any], key: str) -> int | None:
    found = text.get(key)
    return found if isinstance(found, int) else None
