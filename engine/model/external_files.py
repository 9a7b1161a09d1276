"""Writes an adapter for use outside weft: PEFT's two files alone, each encrypted by age if recipients are given.

Two conventions meet in the name of an adapter on the output layer. PEFT and vLLM know the layer by its module, ``lm_head``.
Where the base ties that layer to its embedding, no weight of that name is in the base's files, and tinker-cookbook's merge
planner takes the hosted service's name only. So the head of a tied base has that name, and every other head PEFT's.
"""

from collections.abc import Sequence
from pathlib import Path

import pyrage
from safetensors.torch import save_file

from contracts.age_recipients import parse_recipient
from engine.model.adapter_folder import TINKER_HEAD, WEIGHTS, matrices_by_key, peft_config
from engine.model.atomic_folder import write_atomically
from engine.model.base import BaseModel
from engine.model.lora import LoraWeights

AGE_SUFFIX = ".age"


def write_external_files(directory: Path, base: BaseModel, weights: LoraWeights, recipients: Sequence[str]) -> int:
    """Write the adapter's files and return their size in bytes. With ``recipients`` each file is ``NAME.age``.

    Raises ``OSError`` (a full disk), leaving nothing behind.
    """

    def fill(folder: Path) -> None:
        peft_config(base, weights).save_pretrained(folder)
        tensors = matrices_by_key(weights.layout, weights.vector)
        if base.has_tied_head and base.output_name is not None:
            head = f".{base.output_name}.lora_"
            tensors = {key.replace(head, f".{TINKER_HEAD}.lora_"): tensor for key, tensor in tensors.items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        if recipients:
            _encrypt(folder, recipients)

    return write_atomically(directory, fill)


def _encrypt(folder: Path, recipients: Sequence[str]) -> None:
    parsed = [parse_recipient(text) for text in recipients]
    for path in list(folder.iterdir()):
        # Not ``encrypt_file``: it keeps the interpreter's lock until the whole file is done.
        with path.open("rb") as plain, Path(f"{path}{AGE_SUFFIX}").open("wb") as sealed:
            pyrage.encrypt_io(plain, sealed, parsed)
        path.unlink()
