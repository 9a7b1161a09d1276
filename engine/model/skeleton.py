"""Models without weights (torch's ``meta`` device), which tell the names and kinds of their layers."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from contracts.errors import InvalidRequest
from engine.model.base_outline import ModelNames


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
    return names_of(model)


def names_of(model: PreTrainedModel) -> ModelNames:
    """Return the names in a model, loaded or without weights."""
    names = {module: name for name, module in model.named_modules()}
    output = model.get_output_embeddings()
    return ModelNames(
        prefix=f"{model.base_model_prefix}.",
        head=names.get(output) if output is not None else None,
        embedding=names.get(model.get_input_embeddings()),
        ties_head=bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False)),
        conv1d=frozenset(name for module, name in names.items() if isinstance(module, Conv1D)),
        is_quantized=getattr(model.config, "quantization_config", None) is not None,
    )
