"""Ids under which SDKs ask a hub for the tokenizer of a base model, as ``tinker`` makes them from the model's name."""

import re

_REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")
_LONGEST = 96
_LLAMA_3 = "meta-llama/Llama-3"
_LLAMA_3_TOKENIZER = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


def sdk_tokenizer_id(model_name: str) -> str:
    """Return the id that the SDK gives to ``AutoTokenizer`` when the server names none.

    The rule is that of ``tinker`` 0.18 to 0.38 (``_load_tokenizer_from_model_info``). A name is cut at its first colon. Llama 3
    has a repository that is not gated. A name of three parts loses its last.
    """
    name = model_name.split(":", 1)[0]
    if name.startswith(_LLAMA_3):
        return _LLAMA_3_TOKENIZER
    return name.rpartition("/")[0] if name.count("/") == 2 else name


def is_repository_id(text: str) -> bool:
    """Return whether ``huggingface_hub`` takes ``text`` for a repository: ``name`` or ``owner/name``, and no path."""
    return len(text) <= _LONGEST and _REPOSITORY.fullmatch(text) is not None and not re.search(r"\.\.|--|\.git$", text)
