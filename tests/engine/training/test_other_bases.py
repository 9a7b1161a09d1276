"""Architectures that hand their projections, or their head, something else than the tiny base does."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    MixtralConfig,
    MptConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, OptimStep
from engine.model.base import BaseModel, _usable_projections
from engine.model.input_layout import InputLayout, observe_layouts
from engine.model.lora import AdapterSegment
from engine.training.trainer import Trainer
from tests.engine.training.conftest import (
    NEIGHBOUR,
    RUN,
    backward,
    gradients_of,
    make_batch,
    randomise,
    reference_for,
    settings,
)

_SIZES = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_FLATTENING: dict[str, PretrainedConfig] = {
    "opt": OPTConfig(**_SIZES, ffn_dim=96, max_position_embeddings=128, word_embed_proj_dim=64, dropout=0.0),
    "qwen2_moe": Qwen2MoeConfig(
        **_SIZES,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    ),
}
_OWN_HEAD = MptConfig(d_model=64, n_heads=4, n_layers=2, max_seq_len=128, vocab_size=300, logit_scale=0.5)
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 96, "tie_word_embeddings": False}
_CHANGED_LOGITS: dict[str, PretrainedConfig] = {
    "capped": Gemma2Config(**_GROUPED, head_dim=16, final_logit_softcapping=30.0, sliding_window=16),
    "scaled": GraniteConfig(**_GROUPED, logits_scaling=1.3),
}
_ROUTED: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**_SIZES, intermediate_size=96, num_key_value_heads=2, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(
        **_SIZES, num_key_value_heads=2, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
    "gpt_oss": GptOssConfig(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
    ),
}
_NEIGHBOUR_LENGTHS = (9, 4, 2)


def write_base(config: PretrainedConfig, directory: Path) -> Path:
    """A base of random weights."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    return directory


def load_base(directory: Path, dtype: str = "auto", vocabulary: int = 300) -> BaseModel:
    """The base in a folder."""
    facts = BaseModelFacts("other", directory, "other", 128, vocabulary, None)
    return BaseModel.load(facts, dtype=dtype)


def check_against_peft(model_dir: Path, *, train_mlp: bool = True) -> None:
    """A pass shared with a neighbour of another rank gives what plain PEFT gives alone: loss, logprobs, gradients."""
    trainer = Trainer(load_base(model_dir))
    trainer.create(RUN, settings(train_unembed=False, train_mlp=train_mlp))
    trainer.create(NEIGHBOUR, settings(rank=3, seed=9, train_mlp=train_mlp))
    randomise(trainer, RUN, 5)
    randomise(trainer, NEIGHBOUR, 6)
    reference = reference_for(trainer, RUN, model_dir)
    batch = make_batch(1, LossName.CROSS_ENTROPY)
    neighbour = make_batch(2, LossName.CROSS_ENTROPY, _NEIGHBOUR_LENGTHS)
    result = trainer.run_pass([backward(NEIGHBOUR, neighbour), backward(RUN, batch)])[1]
    assert isinstance(result, ForwardBackwardOutput)
    expected = reference.loss(batch)
    assert result.metrics["loss:sum"] == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-5)
    for datum, logprobs in zip(batch.data, result.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, reference.logprobs(datum).detach().numpy(), atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(expected, reference.parameters)
    for ours, theirs in zip(gradients_of(trainer, RUN), gradients, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-5 * max(float(theirs.abs().max()), 1e-1)


@pytest.mark.parametrize("name", list(_FLATTENING))
def test_projections_given_flattened_tokens_keep_their_rows(name: str, tmp_path: Path) -> None:
    model_dir = write_base(_FLATTENING[name], tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert InputLayout.FLATTENED in observe_layouts(model, names, torch.arange(6).view(2, 3))[0].values()
    check_against_peft(model_dir)


@pytest.mark.parametrize("name", list(_FLATTENING))
def test_whole_forward_applies_adapters_by_row_too(name: str, tmp_path: Path) -> None:
    """The sampler's way into the model: each row as if it were alone."""
    base = load_base(write_base(_FLATTENING[name], tmp_path / name))
    trainer = Trainer(base)
    trainer.create(RUN, settings())
    trainer.create(NEIGHBOUR, settings(rank=3, seed=9))
    adapters = []
    for number, run in enumerate((RUN, NEIGHBOUR)):
        randomise(trainer, run, number)
        adapters.append(trainer.state(run).weights)
    tokens = torch.randint(0, 300, (2, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with base.adapters([AdapterSegment(adapter, row, row + 1) for row, adapter in enumerate(adapters)]):
            together = base.logits(tokens)
        for row, adapter in enumerate(adapters):
            with base.adapters([AdapterSegment(adapter, 0, 1)]):
                torch.testing.assert_close(together[row], base.logits(tokens[row : row + 1])[0], atol=1e-5, rtol=1e-5)


def test_head_of_its_own_kind_is_left_to_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MPT's config has a ``logit_scale`` that its forward does not use."""
    model_dir = write_base(_OWN_HEAD, tmp_path / "mpt")
    assert not load_base(model_dir).has_plain_head
    assert "base model other has a head of its own kind" in caplog.text
    check_against_peft(model_dir)


@pytest.mark.parametrize("name", list(_CHANGED_LOGITS))
def test_logits_capped_or_scaled_in_bfloat16_are_computed_in_chunks(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounded as transformers rounds them, for logits of up to about 20. A pass in float32 agrees with plain PEFT."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(_CHANGED_LOGITS[name]).float()
    tokens = torch.arange(6).view(2, 3)
    with torch.no_grad():
        head = model.get_output_embeddings()
        states = model.base_model(input_ids=tokens).last_hidden_state
        head.weight.mul_(20 / head(states).abs().max())
    model.save_pretrained(tmp_path / name)
    base = load_base(tmp_path / name, dtype="bfloat16")
    assert float(base.logits(tokens).abs().max()) > 10
    assert base.has_plain_head
    assert "head of its own kind" not in caplog.text
    check_against_peft(tmp_path / name)


@pytest.mark.parametrize("name", list(_ROUTED))
def test_base_whose_experts_are_all_routed_trains_its_attention_and_refuses_to_train_its_mlp(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(load_base(write_base(_ROUTED[name], tmp_path / name)))
    assert "routed experts, which adapters do not change" in caplog.text
    with pytest.raises(InvalidRequest, match="train_mlp must be false"):
        trainer.create(NEIGHBOUR, settings())
    check_against_peft(tmp_path / name, train_mlp=False)


def test_base_without_any_layer_that_adapters_can_change_is_refused(tmp_path: Path) -> None:
    base = load_base(write_base(_ROUTED["mixtral"], tmp_path / "mixtral"))
    for group in ("attn", "unembed"):
        assert any(projection.group == group for projection in base.projections.values())
    with pytest.raises(InvalidRequest, match="no projections as linear layers"):
        _usable_projections(base.facts, {}, {})


def test_bfloat16_base_trains_close_to_float32_with_float32_state(tiny_model_dir: Path, base: BaseModel) -> None:
    """Eight steps beside a neighbour: every loss within 1%, weights, gradient and moments float32."""
    rough = Trainer(load_base(tiny_model_dir, dtype="bfloat16", vocabulary=320))
    exact = Trainer(base)
    batch, beside = (make_batch(seed, LossName.CROSS_ENTROPY) for seed in (3, 4))
    batch = replace(batch, data=[replace(datum, inputs={}) for datum in batch.data])
    losses: list[list[float]] = []
    for trainer in (rough, exact):
        trainer.create(RUN, settings())
        trainer.create(NEIGHBOUR, settings(rank=3, seed=9))
        losses.append([])
        for _ in range(8):
            result = trainer.run_pass([backward(NEIGHBOUR, beside), backward(RUN, batch)])[1]
            assert isinstance(result, ForwardBackwardOutput)
            losses[-1].append(result.metrics["loss:sum"])
            gradient = trainer.state(RUN).gradient
            trainer.optim_steps([(NEIGHBOUR, OptimStep()), (RUN, OptimStep(learning_rate=3e-3))])
            state = trainer.state(RUN)
            assert gradient is not None
            assert state.optimizer is not None
            tensors = (gradient, state.weights.vector, state.optimizer.exp_avg, state.optimizer.exp_avg_sq)
            assert all(tensor.dtype == torch.float32 for tensor in tensors)
    assert losses[1][-1] < 0.9 * losses[1][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_bfloat16_head_gradient_does_not_depend_on_the_number_of_chunks(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output layer's A and B, in one chunk and in hundreds, beside a neighbour. Few targets, so that terms add up."""
    base = load_base(tiny_model_dir, dtype="bfloat16", vocabulary=320)
    batch = make_batch(3, LossName.CROSS_ENTROPY, (100,) * 8)
    batch = replace(batch, data=[replace(datum, inputs={}, targets=datum.targets % 20) for datum in batch.data])
    beside = make_batch(4, LossName.CROSS_ENTROPY, (90, 60))
    found: list[dict[RunId, torch.Tensor]] = []
    for chunk in (1000, 2):
        monkeypatch.setattr("engine.training.target_logprobs.CHUNK_LOGITS", chunk * 320)
        trainer = Trainer(base)
        trainer.create(RUN, settings())
        trainer.create(NEIGHBOUR, settings(rank=3, seed=9))
        gradients = {}
        for number, run in enumerate((RUN, NEIGHBOUR)):
            randomise(trainer, run, number)
        trainer.run_pass([backward(NEIGHBOUR, beside), backward(RUN, batch)])
        for run in (RUN, NEIGHBOUR):
            gradient = trainer.state(run).gradient
            assert gradient is not None
            gradients[run] = gradient[trainer.state(run).weights.layout.head]
        found.append(gradients)
    whole, chunked = found
    for run in (RUN, NEIGHBOUR):
        assert float((chunked[run] - whole[run]).norm() / whole[run].norm()) < 5e-3


def test_adapters_are_active_in_their_own_thread_only(trainer: Trainer, base: BaseModel) -> None:
    trainer.create(RUN, settings())
    randomise(trainer, RUN, 1)
    tokens = torch.arange(5)[None]
    elsewhere: list[torch.Tensor] = []

    def forward() -> None:
        with torch.no_grad():
            elsewhere.append(base.logits(tokens))

    with torch.no_grad():
        bare = base.logits(tokens)
        with base.adapters([AdapterSegment(trainer.state(RUN).weights, 0, 1)]):
            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()
            adapted = base.logits(tokens)
    assert torch.equal(elsewhere[0], bare)
    assert not torch.allclose(adapted, bare)


def test_conv1d_base_takes_many_neighbours(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    )
    trainer = Trainer(load_base(write_base(config, tmp_path / "gpt2")))
    runs = [RunId(f"r{number}:train:0") for number in range(4)]
    alone = RunId("alone:train:0")
    for number, run in enumerate(runs):
        trainer.create(run, settings(rank=1 + number, seed=number))
        randomise(trainer, run, number)
    trainer.create(alone, settings(rank=3, seed=2))
    randomise(trainer, alone, 2)
    batches = [make_batch(number, LossName.CROSS_ENTROPY, (4 + number, 11)) for number in range(4)]
    trainer.run_pass([backward(run, batch) for run, batch in zip(runs, batches, strict=True)])
    trainer.run_pass([backward(alone, batches[2])])
    for ours, theirs in zip(gradients_of(trainer, runs[2]), gradients_of(trainer, alone), strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-5 * max(float(theirs.abs().max()), 1e-1)
