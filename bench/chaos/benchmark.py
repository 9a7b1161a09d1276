"""Faults of many kinds while tenants train and sample: ``python -m bench.chaos --faults 60``.

Starts a Redis, a PostgreSQL of its own and ``weft up`` with two APIs, trainers and pools. Faults strike one after another, each
at a random moment after every tenant has recovered from the last; every kind strikes before one strikes again. Recovered: every
tenant has the answer to a training step and to a sample that were sent after the fault was over. Prints, last, one JSON line.
Weights are compared with the same steps on the engine alone, usage with what was answered; samples may be pruned meanwhile.
Needs PostgreSQL's and Redis's server programs, and ``prlimit``.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.chaos.faults import FAULTS
from bench.chaos.ground import BASE, FaultNotOverError, Ground, keys_of, started_ground
from bench.chaos.tenant import Account, ChaosTenant
from bench.chaos.verdict import judge, judge_usage, wait_for_recovery
from engine.model.base import BaseModel

_LONGEST_CALM_SECONDS = 2.0


@dataclass(slots=True)
class Faults:
    """The faults of one run, and the seconds until every tenant had recovered."""

    kinds: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    unrecovered: int = 0


def in_rounds(kinds: Sequence[str], chance: random.Random) -> Iterator[str]:
    """Yield kinds for ever, each once a round, in a random order."""
    while True:
        yield from chance.sample(kinds, len(kinds))


def strike_at_random(
    ground: Ground, accounts: Sequence[Account], kinds: Sequence[str], *, count: int, seed: int
) -> Faults:
    """Let ``count`` faults strike, and wait after each until every tenant has recovered."""
    chance, faults = random.Random(seed), Faults()
    for kind in in_rounds(kinds, chance):
        if len(faults.kinds) == count:
            break
        threading.Event().wait(chance.uniform(0.0, _LONGEST_CALM_SECONDS))
        began = time.monotonic()
        faults.kinds.append(kind)
        try:
            FAULTS[kind](ground, chance)
        except FaultNotOverError as error:
            print(f"fault {len(faults.kinds):3} {kind:18} {error}", flush=True)
            faults.unrecovered += 1
            break
        over = time.monotonic()
        seconds = wait_for_recovery(accounts, over)
        told = "never" if seconds is None else f"after {seconds:6.2f} s"
        print(f"fault {len(faults.kinds):3} {kind:18} lasted {over - began:6.2f} s, recovered {told}", flush=True)
        if seconds is None:
            faults.unrecovered += 1
            break
        faults.recoveries.append(seconds)
    return faults


def run(*, count: int, kinds: Sequence[str], tenants: int, seed: int) -> dict[str, object]:
    """Run the benchmark and return its figures."""
    torch.set_num_threads(1)
    began = datetime.now(UTC)
    with (
        tempfile.TemporaryDirectory(prefix="weft-chaos-") as name,
        started_ground(Path(name)) as ground,
    ):
        keys = keys_of(ground, [f"chaos-{number}" for number in range(tenants)])
        vocabulary = ground.facts.vocabulary_size
        found = [
            ChaosTenant(number, base_url=ground.cluster.base_url, key=key, base_model=BASE, vocabulary=vocabulary)
            for number, key in enumerate(keys)
        ]
        for tenant in found:
            tenant.start()
        accounts = [tenant.account for tenant in found]
        try:
            wait_for_recovery(accounts, time.monotonic())
            done = strike_at_random(ground, accounts, kinds, count=count, seed=seed)
        finally:
            for tenant in found:
                tenant.stop()
        verdict = judge(found, ground.cluster, ground.data, BaseModel.load(ground.facts))
        verdict |= judge_usage(found, ground, began)
        for account in accounts:
            for text in (*account.lost, *account.failed):
                print("lost or failed:", text)
        if done.unrecovered or verdict["lost_operations"] or verdict["innocent_failures"]:
            print(ground.cluster.printed_tail(8000))
    return {
        "faults": len(done.kinds),
        "struck": dict(Counter(done.kinds)),
        "kinds": len(set(done.kinds)),
        **verdict,
        "unrecovered": done.unrecovered,
        "recovery_p50_s": statistics.median(done.recoveries) if done.recoveries else None,
        "recovery_p95_s": sorted(done.recoveries)[int(0.95 * (len(done.recoveries) - 1))] if done.recoveries else None,
        "recovery_max_s": max(done.recoveries, default=None),
        "steps": sum(account.steps for account in accounts),
        "samples": sum(len(account.sampled) for account in accounts),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--kinds", nargs="+", choices=sorted(FAULTS), default=sorted(FAULTS), help="default: all")
    parser.add_argument("--tenants", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(run(count=options.faults, kinds=options.kinds, tenants=options.tenants, seed=options.seed)))
