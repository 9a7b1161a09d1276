"""Models without weights (torch's ``meta`` device), which tell the names and kinds of their layers."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from contracts.errors import InvalidRequest
from engine.model.base_outline import ModelNames
from engine.model.stored_tensors import files_by_key


def read_names(base: Path) -> ModelNames:
    """Return the names in the model in the folder ``base``. Raises ``InvalidRequest`` when it is none."""
    if not (base / "config.json").is_file():
        raise InvalidRequest(f"{base} holds no config.json; give the base's Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(str(base), local_files_only=True)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequest("the base cannot be merged into: its config is of no causal language model") from error
    return names_of(model, base)


def names_of(model: PreTrainedModel, base: Path) -> ModelNames:
    """Return the names in a model, loaded or without weights, and in the files of its folder ``base``. Blocking.

    Raises ``InvalidRequest`` for a base without safetensors files.
    """
    stored, converted = _stored(model, files_by_key(base))
    names = {module: name for name, module in model.named_modules()}
    output = model.get_output_embeddings()
    return ModelNames(
        stored=stored,
        converted=converted,
        head=names.get(output) if output is not None else None,
        embedding=names.get(model.get_input_embeddings()),
        ties_head=bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False)),
        conv1d=frozenset(name for module, name in names.items() if isinstance(module, Conv1D)),
        is_quantized=getattr(model.config, "quantization_config", None) is not None,
    )


def _stored(model: PreTrainedModel, keys: Iterable[str]) -> tuple[dict[str, str], frozenset[str]]:
    """Return ``stored`` and ``converted`` of ``ModelNames``, by the very renamings with which transformers loads."""
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    own = dict.fromkeys(model.state_dict(), True)
    found: dict[str, str] = {}
    is_converted = False
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if name not in own and key in own:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, own)
        if pattern is not None:
            is_converted = True
        elif name in own:
            found[name] = key
    missing = [name.removesuffix(".weight") for name in own if name.endswith(".weight") and name not in found]
    return {name: key for name, key in found.items() if name != key}, frozenset(missing if is_converted else ())
