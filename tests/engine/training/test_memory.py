"""Bounds on a pass's memory: padding, logits, activations. Measured on the tensors that torch makes and keeps."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as checked
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from contracts.base_model import BaseModelFacts, read_base_model_facts
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput
from engine.model.base import BaseModel
from engine.training.executors.threads import MicroBatchThreads
from engine.training.micro_batch import (
    LEAST_POSITIONS,
    MAX_PADDING_RATIO,
    SMALL_WASTE,
    PackedRow,
    padded_tokens,
    split_rows,
)
from engine.training.target_logprobs import CHUNK_LOGITS
from engine.training.trainer import PassItem, Trainer
from tests.engine.training.conftest import NEIGHBOUR, RUN, backward, gradients_of, make_batch, randomise, settings

VOCABULARY = 32768
"""Vocabulary so large that a chunk is 128 positions."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    """A small base of a large vocabulary."""
    directory = tmp_path_factory.mktemp("models") / "wide"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    return BaseModel.load(BaseModelFacts("wide", directory, "wide", 2048, VOCABULARY, None))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Micro-batches one after another in the test's own thread: torch's watchers see no other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class LargestLogits(TorchDispatchMode):
    """Elements of the largest tensor made with the vocabulary among its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and VOCABULARY in tensor.shape:
                self.elements = max(self.elements, tensor.numel())
        return made


class KeptForBackward:
    """Bytes that autograd keeps for backward passes: now, and at most so far; ``counts`` says which tensors."""

    def __init__(self, counts: Callable[[Tensor], bool] = lambda _tensor: True) -> None:
        self._counts = counts
        self.now = self.peak = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what is kept by graphs that are made inside."""
        watch = self

        class Kept:
            def __init__(self, tensor: Tensor) -> None:
                # With its history it would keep the graph that keeps it.
                self.tensor = tensor.detach()
                self.nbytes = tensor.nbytes if watch._counts(tensor) else 0
                watch.now += self.nbytes
                watch.peak = max(watch.peak, watch.now)

            def __del__(self) -> None:
                watch.now -= self.nbytes

        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            yield


def check(trainer: Trainer, items: Sequence[PassItem]) -> None:
    """A pass in which everything works."""
    assert all(isinstance(outcome, ForwardBackwardOutput) for outcome in trainer.run_pass(items))


@checked(max_examples=300)
@given(
    st.lists(st.integers(1, 40) | st.integers(1, 3000), max_size=80),
    st.sampled_from([1, 64, 512, 2048, 16384]),
)
def test_padding_stays_within_its_bound_and_nothing_is_left_out(lengths: list[int], token_budget: int) -> None:
    """The bound that ``micro_batch`` states; and a micro-batch over the budget is one row alone."""
    rows = [PackedRow(member, member % 3, length) for member, length in enumerate(lengths)]
    batches = split_rows(rows, token_budget=token_budget)
    assert sorted((row for batch in batches for row in batch), key=lambda row: row.member) == rows
    for batch in batches:
        padded, real = padded_tokens(batch), sum(row.length for row in batch)
        assert padded <= token_budget or len(batch) == 1
        assert padded <= MAX_PADDING_RATIO * real or padded - real <= SMALL_WASTE


@checked(max_examples=300)
@given(
    st.lists(st.integers(1, 40) | st.integers(1, 3000), max_size=80),
    st.sampled_from([1, 64, 512, 2048, 16384]),
    st.sampled_from([1, 2, 3, 16]),
)
def test_micro_batches_at_once_stay_within_the_token_budget(lengths: list[int], token_budget: int, cores: int) -> None:
    """All that are computed beside each other, unless each has the least or is one row alone; nothing is left out."""
    rows = [PackedRow(member, member % 3, length) for member, length in enumerate(lengths)]
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        threads = MicroBatchThreads(torch.device("cpu"))
    finally:
        torch.set_num_threads(before)
    for slots in {1, cores}:
        batches = threads.split(rows, token_budget=token_budget, slots=slots)
        assert sorted((row for batch in batches for row in batch), key=lambda row: row.member) == rows
        several = [padded_tokens(batch) for batch in batches if len(batch) > 1]
        assert max(several, default=0) <= max(token_budget // cores, min(token_budget, LEAST_POSITIONS))
        assert [padded_tokens(batch) for batch in batches] == sorted(map(padded_tokens, batches), reverse=True)


def test_no_micro_batch_computes_more_positions_than_the_token_budget(base: BaseModel) -> None:
    """The base's inputs, padding included, in a pass of many operations; one long sequence goes alone."""
    trainer = Trainer(base, pass_token_budget=64)
    shapes: list[torch.Size] = []

    def note(_module: object, _inputs: object, named: dict[str, Tensor]) -> None:
        shapes.append(named["input_ids"].shape)

    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings())
    watching = base.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        long = backward(RUN, make_batch(1, LossName.CROSS_ENTROPY, (3, 40, 17, 100, 9)))
        short = [PassItem(NEIGHBOUR, make_batch(seed, LossName.PPO, (5, 31, 8, 8)), seed > 4) for seed in range(2, 8)]
        check(trainer, [long, *short])
    finally:
        watching.remove()
    assert max(shape.numel() for shape in shapes if shape[0] > 1) <= 64
    assert [shape for shape in shapes if shape.numel() > 64] == [torch.Size((1, 100))]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("width", [None, 2], ids=["targets-N", "targets-NK"])
@pytest.mark.parametrize("head", [True, False], ids=["head", "no-head"])
def test_no_logits_beyond_a_chunk(wide: BaseModel, head: bool, width: int | None) -> None:
    """768 positions of two tenants are six chunks: none is made larger, and autograd never keeps them all."""
    trainer = Trainer(wide)
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings(rank=2, train_unembed=head))
    items = [
        backward(run, make_batch(number, LossName.CROSS_ENTROPY, (300, 84), width=width))
        for number, run in enumerate((RUN, NEIGHBOUR))
    ]
    kept = KeptForBackward(lambda tensor: VOCABULARY in tensor.shape and tensor.numel() > CHUNK_LOGITS // 2)
    with LargestLogits() as largest, kept.watch():
        check(trainer, [*items, replace(items[0], backward=False)])
    assert CHUNK_LOGITS // 2 < largest.elements <= CHUNK_LOGITS
    assert kept.peak <= 2 * 4 * CHUNK_LOGITS
    assert kept.now == 0


@pytest.mark.usefixtures("one_thread")
def test_activations_grow_with_the_token_budget_not_with_the_pass(base: BaseModel) -> None:
    """Eight times the sequences, of two tenants, keep as much at once as fill the budget alone."""
    peaks = []
    for sequences in (4, 32):
        trainer = Trainer(base, pass_token_budget=256)
        kept = KeptForBackward()
        for run in (RUN, NEIGHBOUR):
            trainer.create(run, settings())
        with kept.watch():
            check(
                trainer,
                [backward(run, make_batch(1, LossName.CROSS_ENTROPY, (32,) * sequences)) for run in (RUN, NEIGHBOUR)],
            )
        peaks.append(kept.peak)
        assert kept.now == 0
    assert peaks[1] <= 1.05 * peaks[0]


@pytest.mark.usefixtures("one_thread")
def test_gradient_checkpointing_keeps_less_and_gives_equal_gradients(base: BaseModel, tiny_model_dir: Path) -> None:
    facts = read_base_model_facts("weft/tiny", tiny_model_dir, None)
    found: list[list[Tensor]] = []
    peaks: list[int] = []
    for one in (base, BaseModel.load(facts, gradient_checkpointing=True)):
        trainer = Trainer(one)
        for run, rank in ((RUN, 8), (NEIGHBOUR, 3)):
            trainer.create(run, settings(rank=rank))
            randomise(trainer, run, rank)
        kept = KeptForBackward(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
        with kept.watch():
            lengths = (40, 33, 7)
            check(trainer, [backward(run, make_batch(1, LossName.PPO, lengths)) for run in (RUN, NEIGHBOUR)])
        found.append(gradients_of(trainer, RUN) + gradients_of(trainer, NEIGHBOUR))
        peaks.append(kept.peak)
    assert peaks[1] < peaks[0] / 2
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-6 * float(theirs.abs().max())


@pytest.mark.usefixtures("one_thread")
def test_a_pass_computed_again_after_a_failure_has_dropped_the_first_try(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out in the last layer, with two tenants together: each by itself then has all of it."""
    # The test runner's log handler keeps the error, and with it everything that failed.
    monkeypatch.setattr(logging.getLogger("engine.training.fused_micro_batch"), "propagate", False)
    trainer, kept = Trainer(base), KeptForBackward()
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings())
    at_start: list[int] = []

    def begin(_module: object, _inputs: object) -> None:
        at_start.append(kept.now)

    def fail(_module: object, _inputs: object, output: Tensor) -> None:
        if output.shape[0] > 3:
            raise torch.OutOfMemoryError

    layers = list(base.model.base_model.children())
    hooks = [layers[0].register_forward_pre_hook(begin), base.model.base_model.norm.register_forward_hook(fail)]
    try:
        with kept.watch():
            check(trainer, [backward(run, make_batch(1, LossName.PPO)) for run in (RUN, NEIGHBOUR)])
    finally:
        for hook in hooks:
            hook.remove()
    assert kept.peak > 0
    assert at_start == [0, 0, 0]
