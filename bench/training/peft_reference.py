"""The contestant without weft: plain PEFT, one adapter after another, with one ``torch.optim.AdamW`` each."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from bench.workload import ALPHA, LEARNING_RATE, RANK


class PeftReference:
    """A Hugging Face model with ``adapters`` LoRA adapters in it, as PEFT's documentation puts them there.

    ``switch_seconds`` are the seconds in ``set_adapter`` so far. Its cost grows with the number of adapters.
    """

    def __init__(self, model: Path, *, adapters: int, device: str, dtype: str) -> None:
        base = AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype, local_files_only=True).to(device)
        # PEFT's "all-linear" leaves the head out; the SDK's default adapts it.
        targets = sorted(
            {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, nn.Linear)}
        )
        config = LoraConfig(
            r=RANK, lora_alpha=int(ALPHA), target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        self._names = [f"tenant{number}" for number in range(adapters)]
        self._model: Any = get_peft_model(base, config, adapter_name=self._names[0])
        for name in self._names[1:]:
            self._model.add_adapter(name, config)
        self._model.train()
        self._optimizers = self._make_optimizers()
        self.switch_seconds = 0.0

    def _make_optimizers(self) -> list[torch.optim.AdamW]:
        by_name: dict[str, list[Tensor]] = {name: [] for name in self._names}
        for parameter_name, parameter in self._model.named_parameters():
            adapter = parameter_name.split(".")[-2]
            if adapter in by_name:
                by_name[adapter].append(parameter)
        return [
            torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, fused=True)
            for parameters in by_name.values()
        ]

    def step(self, adapter: int, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run forward, backward and AdamW step of one adapter on int64 (sequences, length), and return the summed loss."""
        if len(self._names) > 1:
            started = time.perf_counter()
            self._model.set_adapter(self._names[adapter])
            self.switch_seconds += time.perf_counter() - started
        optimizer = self._optimizers[adapter]
        optimizer.zero_grad(set_to_none=True)
        logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    @contextmanager
    def counting_saved_bytes(self) -> Iterator[dict[int, int]]:
        """Count the bytes that steps inside the block keep for backward passes, by storage, without the model's weights."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield found
