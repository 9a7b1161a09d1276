"""One rank of a group, as ``weft worker`` composes it; a process of its own: ``group_rank <scenario> <model> <results>``.

Rank 0 runs the scenario, which the tests also run in one process, and saves what came out.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event, local

import torch
from torch import Tensor, nn

from contracts.base_model import BaseModelFacts, read_base_model_facts
from contracts.errors import WeftError
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, OptimStep
from engine.model.base import BaseModel
from engine.training.executors.group import TrainerGroup
from engine.training.trainer import PassItem, Trainer
from tests.engine.training.conftest import NEIGHBOUR, RUN, backward, make_batch, randomise, settings

RUNS = ((RUN, 8), (NEIGHBOUR, 3))
LENGTHS = (128, 31, 100, 7, 90, 128, 64)
TOKENS = 512
"""Token budget of a pass: several micro-batches for each rank, of mixed lengths."""
UNLUCKY = {"forward": 7, "backward": 8}
"""Tokens by place: ``failing`` breaks a micro-batch there if one of its sequences consists of this token alone."""
TIMEOUT_SECONDS, SHORT_TIMEOUT_SECONDS = 30.0, 5.0

Found = dict[str, object]


def fresh(trainer: Trainer) -> None:
    """Two tenants' adapters, of different ranks."""
    for run, rank in RUNS:
        trainer.create(run, settings(rank=rank))
        randomise(trainer, run, rank)


def outcome_of(outcome: ForwardBackwardOutput | WeftError) -> Found:
    """The outcome, in what torch saves."""
    if isinstance(outcome, WeftError):
        return {"error": outcome.code}
    return {"loss": outcome.metrics["loss:sum"], "logprobs": [torch.from_numpy(one.copy()) for one in outcome.logprobs]}


def pass_of(trainer: Trainer, items: list[PassItem]) -> Found:
    """The outcomes of one pass, and what is accumulated after it."""
    outcomes = [outcome_of(outcome) for outcome in trainer.run_pass(items)]
    gradients = {str(run): trainer.state(run).gradient for run, _ in RUNS}
    return {"outcomes": outcomes, "gradients": gradients}


def training(trainer: Trainer) -> Found:
    """Steps of two tenants, with several losses, a forward among them."""
    fresh(trainer)
    found: Found = {}
    for number, loss in enumerate((LossName.PPO, LossName.CROSS_ENTROPY, LossName.IMPORTANCE_SAMPLING, LossName.DRO)):
        items = [
            backward(RUN, make_batch(number, loss, LENGTHS)),
            PassItem(RUN, make_batch(20 + number, loss, LENGTHS[:3]), backward=False),
            backward(NEIGHBOUR, make_batch(10 + number, LossName.CROSS_ENTROPY, LENGTHS[number:], width=2)),
        ]
        found[f"pass {number}"] = pass_of(trainer, items)
        trainer.optim_steps([(run, OptimStep(learning_rate=1e-3, weight_decay=0.1)) for run, _ in RUNS])
        found[f"weights {number}"] = {str(run): trainer.state(run).weights.vector for run, _ in RUNS}
    return found


def alone(trainer: Trainer) -> Found:
    """Passes of one micro-batch: nothing to compute for the other rank."""
    fresh(trainer)
    batch = make_batch(3, LossName.CROSS_ENTROPY, (9,))
    return {
        "backward": pass_of(trainer, [backward(RUN, batch)]),
        "forward": pass_of(trainer, [PassItem(RUN, batch, backward=False)]),
        "nothing": pass_of(trainer, []),
    }


def unsound(trainer: Trainer) -> Found:
    """Weights that are not finite make one tenant's losses NaN, on both ranks; then, its micro-batch is the only one."""
    fresh(trainer)
    state = trainer.state(RUN)
    state.weights.vector[0] = torch.nan
    mine, neighbours = make_batch(1, LossName.PPO, LENGTHS), make_batch(2, LossName.CROSS_ENTROPY, LENGTHS)
    return {
        "beside": pass_of(trainer, [backward(RUN, mine), backward(NEIGHBOUR, neighbours)]),
        "alone": pass_of(trainer, [backward(RUN, make_batch(1, LossName.PPO, (5,)))]),
        "after": pass_of(trainer, [backward(NEIGHBOUR, neighbours)]),
    }


def broken(trainer: Trainer) -> Found:
    """An adapter that breaks before the first layer, on whichever rank it is."""
    fresh(trainer)
    vector = trainer.state(RUN).weights.vector
    object.__setattr__(trainer.state(RUN).weights, "vector", vector[:-1].clone())
    mine, neighbours = make_batch(1, LossName.PPO, LENGTHS), make_batch(2, LossName.CROSS_ENTROPY, LENGTHS)
    return {"beside": pass_of(trainer, [backward(RUN, mine), backward(NEIGHBOUR, neighbours)])}


def unlucky(trainer: Trainer) -> Found:
    """Memory runs out in the middle of one tenant's micro-batches, one on each rank; the ranks go on together."""
    fresh(trainer)
    mine, neighbours = make_batch(1, LossName.PPO, (128, 31)), make_batch(2, LossName.CROSS_ENTROPY, LENGTHS)
    found: Found = {}
    for place, token in UNLUCKY.items():
        trainer.create(NEIGHBOUR, settings(rank=3))
        randomise(trainer, NEIGHBOUR, 3)
        for datum in mine.data:
            datum.tokens[:] = token
        found[place] = pass_of(trainer, [backward(RUN, mine), backward(NEIGHBOUR, neighbours)])
    found["after"] = pass_of(trainer, [backward(RUN, make_batch(4, LossName.PPO, LENGTHS))])
    return found


@contextmanager
def failing(base: BaseModel) -> Iterator[None]:
    """Out of memory in the third layer's forward or backward, in every micro-batch with an unlucky sequence."""
    met = local()
    """Places to break the micro-batch that the thread computes."""

    def look(_module: nn.Module, _inputs: object, named: dict[str, Tensor]) -> None:
        starts = named["input_ids"][:, :31]
        met.places = [place for place, token in UNLUCKY.items() if bool((starts == token).all(dim=1).any())]

    def fail(_gradient: Tensor | None = None) -> None:
        raise torch.OutOfMemoryError("unlucky")

    def meet(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if "forward" in met.places:
            fail()
        if "backward" in met.places and output.requires_grad:
            output.register_hook(fail)

    hooks = [
        base.model.base_model.register_forward_pre_hook(look, with_kwargs=True),
        base.model.get_submodule("model.layers.2.self_attn.o_proj").register_forward_hook(meet),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


SCENARIOS: dict[str, Callable[[Trainer], Found]] = {
    "training": training,
    "alone": alone,
    "unsound": unsound,
    "broken": broken,
    "unlucky": unlucky,
}


def shards_of(base: BaseModel) -> Found:
    """Elements of the layers' weights on this rank, and in all."""
    layers = [(name, weight) for name, weight in base.model.named_parameters() if ".layers." in name]
    return {
        "local": sum(weight.to_local().numel() for _, weight in layers),
        "all": sum(weight.numel() for _, weight in layers),
    }


def other_facts(model: Path) -> BaseModelFacts:
    """Facts of a base of another architecture, without a tokenizer."""
    return BaseModelFacts("other", model, "other", 128, 300, None)


def main(scenario: str, model: Path, results: Path) -> None:
    """``all`` runs every scenario in one group. ``endless``: passes until a rank is gone.

    ``other``: the training scenario on a base of another architecture. ``idle``: a pass after a time without, then nothing more.
    """
    timeout_seconds = SHORT_TIMEOUT_SECONDS if scenario == "idle" else TIMEOUT_SECONDS
    group = TrainerGroup.join(device="cpu", timeout_seconds=timeout_seconds)
    is_tiny = scenario != "other"
    facts = read_base_model_facts("weft/tiny", model, None) if is_tiny else other_facts(model)
    base = group.load_base(facts, gradient_checkpointing=scenario == "checkpointed")
    with failing(base) if is_tiny else nullcontext():
        if group.leads:
            lead(group, base, scenario, results)
        else:
            group.follow()


def run_rank(scenario: str, model: Path, results: Path, environment: dict[str, str]) -> None:
    """Run a rank in this process, which writes to the rank's log."""
    os.environ.update(environment)
    with (results / f"{environment['RANK']}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    main(scenario, model, results)


def lead(group: TrainerGroup, base: BaseModel, scenario: str, results: Path) -> None:
    """Run the scenario on rank 0."""
    trainer = Trainer(base, pass_token_budget=TOKENS, executor=group)
    if scenario == "endless":
        fresh(trainer)
        while True:
            pass_of(trainer, [backward(RUN, make_batch(1, LossName.PPO, LENGTHS))])
            (results / "passing").touch()
    if scenario == "idle":
        Event().wait(2 * SHORT_TIMEOUT_SECONDS)
        alone(trainer)
        (results / "passing").touch()
        Event().wait(TIMEOUT_SECONDS)
    found: Found = {"shards": shards_of(base)}
    for name in SCENARIOS if scenario == "all" else ("training",):
        found[name] = SCENARIOS[name](trainer)
    group.close()
    torch.save(found, results / "found.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
