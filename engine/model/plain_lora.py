"""Plain LoRA, ``W x + (alpha / rank) B A x`` on the base as it is: all that weft computes, told from an adapter's config.

The settings that leave it at that are listed, and every other one is refused if it is set: a newer PEFT has more.
"""

from collections.abc import Mapping
from typing import Any

from contracts.errors import InvalidRequest

HARMLESS = frozenset(
    {
        # The adapter's origin.
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        # Checked by whoever reads the matrices.
        "r",
        "lora_alpha",
        # Layers, which the names of the matrices tell.
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        # The course of a training, or how a process computes the same.
        "inference_mode",
        "lora_dropout",
        "init_lora_weights",
        "eva_config",
        "fan_in_fan_out",
        "runtime_config",
        "merge_weights",
        # Without effect where another setting is off.
        "megatron_core",
        "qalora_group_size",
        # Checked on its own.
        "bias",
    }
)
"""Settings of PEFT's that change nothing of what an adapter computes, or are checked apart."""
PLAIN_INITS = ("gaussian", "eva", "orthogonal")
"""Named beginnings of the matrices that leave the base's weights alone."""
_SHOWN = 100
_FILE = "adapter_config.json"


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ``InvalidRequest`` for an adapter that uses what weft does not compute."""
    if config.get("peft_type", "LORA") != "LORA":
        raise InvalidRequest("the adapter is none of LoRA: its peft_type must be LORA")
    begun = config.get("init_lora_weights")
    if begun is not None and not isinstance(begun, bool) and begun not in PLAIN_INITS:
        raise InvalidRequest(
            f"the adapter's init_lora_weights is {str(begun)[:_SHOWN]!r}, which may belong to changed weights of the base: save "
            "it with PEFT's path_initial_model_for_weight_conversion, which makes plain LoRA of it, or train one with "
            f"init_lora_weights true, {', '.join(PLAIN_INITS)}"
        )
    if config.get("bias", "none") != "none":
        raise InvalidRequest("the adapter uses PEFT's bias, which weft does not train: train one with bias none")
    for name, value in config.items():
        if value and name not in HARMLESS:
            raise InvalidRequest(
                f"the adapter uses {name[:_SHOWN]}, with which it may compute more than plain LoRA, all that weft trains: train "
                f"one without it, or take it out of {_FILE} if this adapter computes the same without, as once it is converted"
            )
