"""What sampling must know of a base's tokens and text, read from its folder without loading weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.contracts.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class BaseVocabulary:
    """``decode`` turns token ids into their text, special tokens included; None when the folder has no tokenizer."""

    end_of_sequence_ids: frozenset[int]
    decode: Callable[[list[int]], str] | None


def read_vocabulary(path: Path) -> BaseVocabulary:
    """Read a Hugging Face model directory; takes seconds. Raises ``InvalidRequest`` for a config that cannot be read."""
    return BaseVocabulary(_end_of_sequence_ids(path), _decoder(path))


def _end_of_sequence_ids(path: Path) -> frozenset[int]:
    """Tokens that end a text, from the generation config or else the model's."""
    # Here, not above: transformers takes torch along, and who only names the type needs neither.
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


def _decoder(path: Path) -> Callable[[list[int]], str] | None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError):
        return None
    # A folder without tokenizer files can give an empty tokenizer, with which no stop string would ever match.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        return None

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode
