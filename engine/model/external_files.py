"""Writes an adapter for use outside weft: PEFT's two files alone, each encrypted by age if recipients are given.

Two conventions meet in the name of an adapter on the output layer. PEFT and vLLM know the layer by its module, ``lm_head``.
Where the base ties that layer to its embedding, no weight of that name is in the base's files, and tinker-cookbook's merge
planner takes the hosted service's name only. So the head of a tied base has that name, and every other head PEFT's. PEFT would
leave out a head of that name with a warning only, so such an export has the adapter by PEFT's names, too, in a folder of its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyrage
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from contracts.age_recipients import parse_recipient
from engine.model.adapter_folder import TINKER_HEAD, WEIGHTS, matrices_by_key, peft_config
from engine.model.atomic_folder import write_atomically
from engine.model.base import BaseModel
from engine.model.lora import LoraWeights

AGE_SUFFIX = ".age"
PEFT_FOLDER = "peft"
"""Folder within the export of an adapter on a tied head: the same adapter as PEFT and vLLM load it."""


def write_external_files(directory: Path, base: BaseModel, weights: LoraWeights, recipients: Sequence[str]) -> int:
    """Write the adapter's files and return their size in bytes. With ``recipients`` each file is ``NAME.age``.

    An adapter on a tied head is written twice: for the merge planner, and into ``PEFT_FOLDER``.

    Raises ``OSError`` (a full disk), leaving nothing behind.
    """

    def fill(folder: Path) -> None:
        tensors, config = matrices_by_key(weights.layout, weights.vector), peft_config(base, weights)
        if base.has_tied_head and base.output_name in weights.tensors:
            _write(folder / PEFT_FOLDER, config, tensors)
            head = f".{base.output_name}.lora_"
            tensors = {key.replace(head, f".{TINKER_HEAD}.lora_"): tensor for key, tensor in tensors.items()}
        _write(folder, config, tensors)
        if recipients:
            _encrypt(folder, recipients)

    return write_atomically(directory, fill)


def _write(folder: Path, config: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
    config.save_pretrained(folder)
    save_file(dict(tensors), folder / WEIGHTS, {"format": "pt"})


def _encrypt(folder: Path, recipients: Sequence[str]) -> None:
    parsed = [parse_recipient(text) for text in recipients]
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        # Not ``encrypt_file``: it keeps the interpreter's lock until the whole file is done.
        with path.open("rb") as plain, Path(f"{path}{AGE_SUFFIX}").open("wb") as sealed:
            pyrage.encrypt_io(plain, sealed, parsed)
        path.unlink()
