"""A tiny base, PEFT's own adapters on it, and references computed by plain transformers and PEFT."""

import asyncio
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from contracts.base_model import read_base_model_facts
from engine.model.base import BaseModel
from engine.model.tiny_model import write_tiny_model
from engine.sampling.in_process.replica import TorchReplica
from engine.sampling.replica import AdapterVersion
from tests.engine.sampling.drawing import DEADLINE_S, Client

T = TypeVar("T")
QWEN_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


@dataclass(frozen=True)
class Adapted:
    """An adapter on disk and the base with it merged in by PEFT (the bare base when ``version`` is None)."""

    version: AdapterVersion | None
    reference: PreTrainedModel

    def logprobs(self, prompt: list[int], tokens: list[int]) -> np.ndarray:
        """Teacher-forced ``log_softmax`` (P + T, V): row i is what follows the first i tokens; row 0 is NaN."""
        with torch.inference_mode():
            logits = self.reference(torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
        rows = logits.log_softmax(-1).numpy()
        return np.concatenate([np.full((1, rows.shape[1]), np.nan, np.float32), rows[:-1]])

    def of_tokens(self, prompt: list[int], tokens: list[int]) -> np.ndarray:
        """Teacher-forced logprobs (T,) of ``tokens``."""
        table = self.logprobs(prompt, tokens)[len(prompt) :]
        return table[np.arange(len(tokens)), tokens]

    def greedy(self, prompt: list[int], length: int) -> list[int]:
        """transformers' own greedy continuation, end-of-sequence tokens ignored."""
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            made = self.reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
        return [int(token) for token in made[0, len(prompt) :]]


def make_adapter(
    model_path: Path, directory: Path, name: str, seed: int, rank: int, targets: tuple[str, ...]
) -> Adapted:
    """A PEFT adapter of random A and B."""
    with warnings.catch_warnings():
        # PEFT asks transformers for a name that it has deprecated.
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(model_path)
        config = LoraConfig(r=rank, lora_alpha=32, target_modules=list(targets), init_lora_weights=False)
        adapted = get_peft_model(model, config)
        with torch.no_grad():
            for parameter_name, parameter in adapted.named_parameters():
                if ".lora_B." in parameter_name:
                    parameter.mul_(0.5)
        adapted.save_pretrained(str(directory), save_embedding_layers=False)
    merged = adapted.merge_and_unload().eval()
    return Adapted(AdapterVersion(name, directory), merged)


@dataclass(frozen=True)
class World:
    """Everything a test needs of one base."""

    base: BaseModel
    bare: Adapted
    cat: Adapted
    dog: Adapted

    @property
    def everyone(self) -> tuple[Adapted, Adapted, Adapted]:
        return (self.bare, self.cat, self.dog)


def build_world(path: Path, targets: tuple[str, ...], adapters: Path) -> World:
    base = BaseModel.load(read_base_model_facts("tiny", path, None), dtype="float32", device="cpu")
    bare = Adapted(None, AutoModelForCausalLM.from_pretrained(path).eval())
    cat = make_adapter(path, adapters / "cat", "cat", 1, 8, targets)
    dog = make_adapter(path, adapters / "dog", "dog", 2, 4, targets[:2])
    return World(base, bare, cat, dog)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    path = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(path)
    return build_world(path, QWEN_TARGETS, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session")
def make_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[PreTrainedModel, tuple[str, ...]], World]:
    """A world around any model."""

    def build(model: PreTrainedModel, targets: tuple[str, ...]) -> World:
        path = tmp_path_factory.mktemp("base") / "model"
        model.save_pretrained(path)
        return build_world(path, targets, tmp_path_factory.mktemp("adapters"))

    return build


@asynccontextmanager
async def serving(base: BaseModel, **limits: int) -> AsyncIterator[Client]:
    replica = TorchReplica(base, **limits)
    await replica.start()
    try:
        yield Client(replica)
    finally:
        await replica.close()


@pytest.fixture
def serve() -> Callable[..., Any]:
    """``serve(base, task, **limits)``: run ``await task(client)`` against a fresh replica, within a deadline."""

    def run(base: BaseModel, task: Callable[[Client], Awaitable[T]], **limits: int) -> T:
        async def main() -> T:
            async with asyncio.timeout(DEADLINE_S), serving(base, **limits) as client:
                return await task(client)

        return asyncio.run(main())

    return run
