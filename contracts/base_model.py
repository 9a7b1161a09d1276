"""Facts about a base model that can be read from its ``config.json``, without torch and without loading it."""

import json
from dataclasses import dataclass
from pathlib import Path

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


_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


def read_base_model_facts(name: str, path: Path, tokenizer_id: str | None) -> BaseModelFacts:
    """Read the facts of a Hugging Face model directory.

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
    context = next((text[key] for key in _CONTEXT_KEYS if isinstance(text.get(key), int)), None)
    if context is None:
        raise InvalidRequest(
            f"base model {name!r}: config.json gives no context length (looked for {', '.join(_CONTEXT_KEYS)})"
        )
    vocabulary = text.get("vocab_size")
    if not isinstance(vocabulary, int):
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
