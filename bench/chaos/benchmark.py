"""Processes killed at random instants while tenants train and sample: ``python -m bench.chaos``.

Starts a Redis, a throw-away PostgreSQL database and ``weft up`` with two APIs, two trainers and a pool; kills trainers, APIs,
pools and Redis with SIGKILL, one after another, each at a random moment after every tenant has recovered from the last.
Recovered: every tenant has the answer to a training step and to a sample that were sent after the kill. Prints, last, one
JSON line. Weights are compared with the same steps on the engine alone.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench.chaos.tenant import Account, ChaosTenant
from contracts.base_model import read_base_model_facts
from engine.model.base import BaseModel
from engine.model.tiny_model import write_tiny_model
from engine.training.adapter_state import AdapterState
from engine.training.checkpoint_files import read_checkpoint
from testing.cluster_process import ClusterProcess, RedisProcess
from testing.tenants import make_tenants
from testing.throwaway_database import DEFAULT_SERVER, throwaway_database

BASE = "weft/tiny"
TARGETS = ("worker", "worker", "api", "pool", "redis")
"""Kinds of processes to kill, as often as each stands here."""
_RECOVERY_SECONDS = 120.0
_REDIS_AWAY_SECONDS = 1.0
_LONGEST_CALM_SECONDS = 2.0


@dataclass(slots=True)
class Kills:
    """The kills of one run, and the seconds until every tenant had recovered."""

    targets: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    unrecovered: int = 0


def _has_recovered(account: Account, killed: float) -> float | None:
    """Return the time at which the tenant had answers to a step and a sample sent after ``killed``; None: not yet."""
    step = next((answer.answered for answer in account.trained if answer.sent > killed), None)
    sample = next((answer.answered for answer in account.sampled if answer.sent > killed), None)
    return None if step is None or sample is None else max(step, sample)


def wait_for_recovery(accounts: Sequence[Account], killed: float) -> float | None:
    """Return the seconds from ``killed`` until all have recovered; None if they have not in time, or an operation was lost."""
    tick = threading.Event()
    while time.monotonic() - killed < _RECOVERY_SECONDS:
        found = [_has_recovered(account, killed) for account in accounts]
        times = [one for one in found if one is not None]
        if len(times) == len(found):
            return max(times) - killed
        if any(account.lost or account.hung for account in accounts):
            return None
        tick.wait(0.02)
    return None


def kill_at_random(
    cluster: ClusterProcess, redis: RedisProcess, accounts: Sequence[Account], *, count: int, seed: int
) -> Kills:
    """Kill ``count`` times, and wait after each kill until every tenant has recovered."""
    chance, kills, tick = random.Random(seed), Kills(), threading.Event()
    while len(kills.targets) < count:
        tick.wait(chance.uniform(0.0, _LONGEST_CALM_SECONDS))
        target = chance.choice(TARGETS)
        victims = [] if target == "redis" else cluster.children(target)
        if target != "redis" and not victims:
            continue
        killed = time.monotonic()
        if target == "redis":
            redis.kill()
            tick.wait(chance.uniform(0.0, _REDIS_AWAY_SECONDS))
            redis.start()
        else:
            cluster.kill_child(chance.choice(victims))
        kills.targets.append(target)
        seconds = wait_for_recovery(accounts, killed)
        print(f"kill {len(kills.targets):3} {target:7} recovered after {seconds or float('nan'):6.2f} s", flush=True)
        if seconds is None:
            kills.unrecovered += 1
            break
        kills.recoveries.append(seconds)
    return kills


def relative_error(found: AdapterState, wanted: AdapterState) -> float:
    """Return the largest difference of a weight, relative to the largest weight of its matrix."""
    ours, theirs = found.weights.tensors, wanted.weights.tensors
    errors = [0.0]
    for name, pair in theirs.items():
        for left, right in ((ours[name].a, pair.a), (ours[name].b, pair.b)):
            errors.append(float((left - right).abs().max() / right.abs().max().clamp_min(1e-12)))
    return max(errors)


def judge(tenants: Sequence[ChaosTenant], cluster: ClusterProcess, data: Path, base: BaseModel) -> dict[str, float]:
    """Compare every tenant's weights and losses with the same steps on the engine alone."""
    worst, doubled, lost = 0.0, 0, 0
    for tenant in tenants:
        account = tenant.account
        lost += len(account.lost)
        doubled += sum(number != place + 1 for place, number in enumerate(account.step_numbers))
        if not account.checkpoint:
            continue
        name = account.checkpoint.rpartition("/")[2]
        run = account.checkpoint.removeprefix("tinker://").split("/")[0]
        ((directory,),) = cluster.query("SELECT directory FROM checkpoints WHERE run_id = %s AND name = %s", run, name)
        state = read_checkpoint(data / str(directory), base, optimizer=True)
        wanted, losses = tenant.undisturbed(base)
        if state.optimizer is None or state.optimizer.step != account.steps:
            doubled += 1
        worst = max(worst, relative_error(state, wanted))
        worst = max(worst, float(np.max(np.abs(np.array(account.losses) / np.array(losses) - 1.0), initial=0.0)))
    return {"max_relative_weight_error": worst, "doubled_effects": doubled, "lost_operations": lost}


def run(*, kills: int, tenants: int, seed: int, server: str) -> dict[str, object]:
    """Run the benchmark and return its figures."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-chaos-")))
        model = folder / "tiny"
        write_tiny_model(model)
        facts = read_base_model_facts(BASE, model, None)
        database_url = stack.enter_context(throwaway_database(server))
        redis = stack.enter_context(RedisProcess(folder / "redis"))
        cluster = stack.enter_context(
            ClusterProcess(
                data=folder / "data",
                base_models=[f"{BASE}={model}"],
                database_url=database_url,
                redis_url=redis.url,
                options=["--apis", "2", "--trainers", "2"],
                environment={"WEFT_SNAPSHOT_OPERATIONS": "16", "OMP_NUM_THREADS": "1"},
            )
        )
        names = [f"chaos-{number}" for number in range(tenants)]
        keys = make_tenants(folder / "data", names, database_url=database_url)
        found = [
            ChaosTenant(
                number,
                base_url=cluster.base_url,
                key=key,
                base_model=BASE,
                vocabulary=facts.vocabulary_size,
            )
            for number, key in enumerate(keys)
        ]
        for tenant in found:
            tenant.start()
        accounts = [tenant.account for tenant in found]
        began = time.monotonic()
        try:
            wait_for_recovery(accounts, began)
            done = kill_at_random(cluster, redis, accounts, count=kills, seed=seed)
        finally:
            for tenant in found:
                tenant.stop()
        verdict = judge(found, cluster, folder / "data", BaseModel.load(facts))
        for account in accounts:
            for loss in account.lost:
                print("lost:", loss)
        if done.unrecovered:
            print(cluster.printed_tail(6000))
    return {
        "kills": len(done.targets),
        "killed": dict(Counter(done.targets)),
        **verdict,
        "hung_futures": sum(account.hung for account in accounts),
        "recovery_p50_s": statistics.median(done.recoveries) if done.recoveries else None,
        "recovery_max_s": max(done.recoveries, default=None),
        "steps": sum(account.steps for account in accounts),
        "samples": sum(len(account.sampled) for account in accounts),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--tenants", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", default=DEFAULT_SERVER, help="PostgreSQL server for a throw-away database")
    options = parser.parse_args()
    figures = run(kills=options.kills, tenants=options.tenants, seed=options.seed, server=options.database)
    print(json.dumps(figures))
