"""Asynchronous RL against RL in step: ``python -m bench.rl`` (``make vllm`` first).

A ``weft serve`` process with one vLLM server of its own, in float32. Two loops train policies of their own on the same task, in
turns: in step (draw, learn, publish) and asynchronous, with samples in flight all the time from a live sampler that every
publication moves. Each step learns from a batch of groups of samples of various lengths.

The least time of an asynchronous step is the longer one of sampling and training: ``bound`` is the sum of both in step over the
longer of the two. A machine without an accelerator has no two devices, so cores stand for them: vLLM keeps to its cores (all
but the last), and weft, which trains, and the benchmark keep to the last one, in both loops.

Samples in flight of the asynchronous loop end on the version that they began with, or go on with each newer one
(``--swaps continue``): then a publication cuts them, and their prompts and tokens so far are computed again. ``cuts_per_step``
counts that.

The lag of a batch counts versions between the oldest one that drew a token of it, by the service's own report, and the one that
learned from it. Prints a table and, last, one JSON line. Nothing else should run meanwhile: all share the machine.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from bench.bases import write_base
from bench.clients.weft_client import WeftClient
from bench.processes.cpu import children_cpu_seconds, pin
from bench.processes.fresh_process import in_fresh_process, prepare
from bench.report import print_figures
from bench.rl.loops import Turn, asynchronous, in_step
from bench.rl.policy import GroupShape, Policy
from contracts.base_model import read_base_model_facts
from testing.service_process import ServiceProcess
from testing.tenants import make_tenants

BASE = "weft/base"
_PARTS = (1.0, 0.5, 1.25, 0.75, 1.5)
"""Lengths of groups in turn, as multiples of the mean."""
_ENVIRONMENT = {
    "WEFT_VLLM_REPLICAS": "1",
    "WEFT_VLLM_CONTEXT_LENGTH": "1024",
    "WEFT_BASE_DTYPE": "float32",
    "WEFT_MAX_RANK": "8",
}


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="small", help="tiny or small")
    parser.add_argument("--rounds", type=int, default=2, help="both loops take a turn in each")
    parser.add_argument("--steps", type=int, default=10, help="of each turn, that count")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them; at least --max-lag")
    parser.add_argument("--groups", type=int, default=5, help="of a batch")
    parser.add_argument("--samples", type=int, default=8, help="of a group")
    parser.add_argument("--tokens", type=int, default=48, help="of a sample, in the mean")
    parser.add_argument("--max-lag", type=int, default=2, help="bound of the asynchronous loop, in versions")
    parser.add_argument("--swaps", default="finish", choices=["finish", "continue"], help="of the asynchronous loop")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--shared-cores", action="store_true", help="leave weft free to use vLLM's cores")
    return parser.parse_args()


def keep_apart(service: ServiceProcess) -> None:
    """Keep weft and this process on the last core; vLLM is kept off it by weft."""
    last = {max(os.sched_getaffinity(0))}
    pin(service.pid, last)
    pin(os.getpid(), last)


async def take_turns(
    service: ServiceProcess, key: str, vocabulary: int, options: argparse.Namespace
) -> dict[str, list[Turn]]:
    """Run both loops in each round, the order reversed in every second one."""
    shape = GroupShape(options.samples, tuple(max(1, int(part * options.tokens)) for part in _PARTS))
    turns: dict[str, list[Turn]] = {"in_step": [], "async": []}
    sizes = {"groups": options.groups, "steps": options.steps, "warm_up": options.warm_up}
    async with WeftClient(service.base_url, key) as client:
        for number in range(options.rounds):
            for name in list(turns) if number % 2 == 0 else reversed(turns):
                policy = await Policy.create(
                    client,
                    shape,
                    base_model=BASE,
                    vocabulary=vocabulary,
                    learning_rate=options.learning_rate,
                    seed=number,
                )
                began = children_cpu_seconds(service.pid)
                if name == "async":
                    await policy.follow(options.swaps, max_lag=options.max_lag)
                    turn = await asynchronous(policy, **sizes, max_lag=options.max_lag)
                else:
                    turn = await in_step(policy, **sizes)
                batches = policy.asked / options.samples / options.groups
                turn.sampler_cpu = (children_cpu_seconds(service.pid) - began) / batches
                turns[name].append(turn)
                curve = " ".join(f"{reward:.2f}" for reward in turn.rewards)
                print(f"{name:8} {turn.seconds:7.1f} s  lag {turn.largest_lag}  rewards {curve}", flush=True)
    return turns


def figures_of(turns: dict[str, list[Turn]], options: argparse.Namespace) -> dict[str, float]:
    """Return every figure. Times are sums over the rounds."""
    stepped, free = turns["in_step"], turns["async"]
    sampling, training = sum(turn.sampling for turn in stepped), sum(turn.training for turn in stepped)
    bound = (sampling + training) / max(sampling, training)
    speedup = sum(turn.seconds for turn in stepped) / sum(turn.seconds for turn in free)
    steps = options.steps * options.rounds
    return {
        "async_speedup": speedup,
        "bound": bound,
        "async_to_bound": speedup / bound,
        "in_step_s_per_step": sum(turn.seconds for turn in stepped) / steps,
        "async_s_per_step": sum(turn.seconds for turn in free) / steps,
        "sampling_s_per_step": sampling / steps,
        "training_s_per_step": training / steps,
        "in_step_vllm_cpu_s_per_batch": sum(turn.sampler_cpu for turn in stepped) / len(stepped),
        "async_vllm_cpu_s_per_batch": sum(turn.sampler_cpu for turn in free) / len(free),
        "max_version_lag": max(turn.largest_lag for turn in free),
        "version_lag_bound": options.max_lag,
        "in_step_version_lag": max(turn.largest_lag for turn in stepped),
        "cuts_per_step": sum(turn.cuts for turn in free) / (steps + options.warm_up * options.rounds),
        "lost": sum(turn.lost for turn in stepped + free),
        "reward_first": sum(turn.rewards[0] for turn in stepped + free) / len(stepped + free),
        "reward_in_step": sum(turn.final_reward() for turn in stepped) / len(stepped),
        "reward_async": sum(turn.final_reward() for turn in free) / len(free),
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure and return every figure."""
    model, data = folder / options.base, folder / "data"
    in_fresh_process(write_base, options.base, model, dtype="float32")
    vocabulary = read_base_model_facts(BASE, model, None).vocabulary_size
    (key,) = make_tenants(data, ["learner"])
    with ServiceProcess(data=data, base_models=[f"{BASE}={model}"], environment=_ENVIRONMENT) as service:
        if not options.shared_cores:
            keep_apart(service)
        try:
            turns = asyncio.run(take_turns(service, key, vocabulary, options))
        except RuntimeError:
            print(service.log_tail(), file=sys.stderr)
            raise
    return figures_of(turns, options)


def main() -> None:
    """Measure and print."""
    options = parse_options()
    prepare()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        figures = measure(Path(folder), options)
    print_figures(figures)
