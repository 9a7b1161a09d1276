"""The tiny base: made by the project, deterministic, and quick to teach a sentence."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from contracts.base_model import read_base_model_facts
from contracts.losses import LossName
from contracts.operations import Datum, LossSpec, OptimStep, TrainingBatch
from engine.model.base import BaseModel
from engine.model.lora import AdapterSegment
from engine.model.tiny_model import write_tiny_model
from engine.sampling.vocabulary import read_vocabulary
from engine.training.trainer import Trainer
from tests.engine.training.conftest import RUN, backward, settings

_SENTENCE = "meow meow meow."
_STEPS_TO_LEARN = 60


def test_same_seed_writes_the_same_weights(tiny_model_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    write_tiny_model(tmp_path / "again")
    write_tiny_model(tmp_path / "other", seed=1)
    first, again, other = (
        load_file(folder / "model.safetensors") for folder in (tiny_model_dir, tmp_path / "again", tmp_path / "other")
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_tokenizer_is_byte_level_with_a_chat_template(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir, local_files_only=True)
    text = "naïve 猫 🐈\n"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert read_vocabulary(tiny_model_dir).end_of_sequence_ids == {tokenizer.eos_token_id}


def test_an_adapter_learns_a_sentence(tiny_model_dir: Path) -> None:
    """Supervised steps at rank 16 and learning rate 1e-2 until greedy decoding says it."""
    base = BaseModel.load(read_base_model_facts("weft/tiny", tiny_model_dir, None))
    trainer = Trainer(base)
    trainer.create(RUN, settings(rank=16))
    prompt, answer = list(b"cat: "), list(_SENTENCE.encode())
    tokens = np.array(prompt + answer)
    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(answer), np.float32)
    batch = TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [Datum(tokens[:-1], tokens[1:], {"weights": weights})])
    for _ in range(_STEPS_TO_LEARN):
        trainer.run_pass([backward(RUN, batch)])
        trainer.optim_step(RUN, OptimStep(learning_rate=1e-2))
        if _continue(base, trainer, prompt, len(answer)) == _SENTENCE:
            return
    raise AssertionError(f"not learned in {_STEPS_TO_LEARN} steps: {_continue(base, trainer, prompt, len(answer))!r}")


def _continue(base: BaseModel, trainer: Trainer, prompt: list[int], length: int) -> str:
    tokens = list(prompt)
    with torch.no_grad(), base.adapters([AdapterSegment(trainer.state(RUN).weights, 0, 1)]):
        while len(tokens) < len(prompt) + length:
            tokens.append(int(base.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return bytes(token % 256 for token in tokens[len(prompt) :]).decode(errors="replace")
