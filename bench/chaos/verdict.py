"""The verdict over a run: recovery after each fault, every tenant's weights against the engine alone, and its usage."""

import json
import subprocess
import threading
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np

from bench.chaos.ground import Ground
from bench.chaos.tenant import Account, ChaosTenant
from engine.model.base import BaseModel
from engine.training.adapter_state import AdapterState
from engine.training.checkpoint_files import read_checkpoint
from testing.cluster_process import ClusterProcess

_RECOVERY_SECONDS = 120.0


def _has_recovered(account: Account, over: float) -> float | None:
    """Return the time at which the tenant had answers to a step and a sample sent after ``over``; None: not yet."""
    step = next((answer.answered for answer in reversed(account.trained) if answer.sent > over), None)
    sample = next((answer.answered for answer in reversed(account.sampled) if answer.sent > over), None)
    return None if step is None or sample is None else max(step, sample)


def wait_for_recovery(accounts: Sequence[Account], over: float) -> float | None:
    """Return the seconds from ``over`` until all have recovered; None if they have not in time, or an operation was lost."""
    tick = threading.Event()
    times: dict[int, float] = {}
    while time.monotonic() - over < _RECOVERY_SECONDS:
        for place, account in enumerate(accounts):
            if place not in times and (found := _has_recovered(account, over)) is not None:
                times[place] = found
        if len(times) == len(accounts):
            return max(times.values()) - over
        if any(account.lost or account.failed or account.hung for account in accounts):
            return None
        tick.wait(0.02)
    return None


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
    worst, doubled = 0.0, 0
    for tenant in tenants:
        account = tenant.account
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
    return {
        "max_relative_weight_error": worst,
        "doubled_effects": doubled,
        "lost_operations": sum(len(tenant.account.lost) for tenant in tenants),
        "innocent_failures": sum(len(tenant.account.failed) for tenant in tenants),
        "hung_futures": sum(tenant.account.hung for tenant in tenants),
    }


def judge_usage(tenants: Sequence[ChaosTenant], ground: Ground, began: datetime) -> dict[str, int]:
    """Compare the service's usage since ``began`` with what was answered as done, and have the service count it again.

    - ``usage_minus_done_tokens``: sum of the differences of every tenant's trained, prompt's and drawn tokens, without signs.
    - ``usage_sums_that_differ``: sums that ``weft usage verify`` finds wrong, of any tenant.
    """
    differences = 0
    for tenant in tenants:
        told = _usage(ground.cluster.base_url, tenant.key, began)
        differences += sum(abs(told[name] - tokens) for name, tokens in tenant.done_tokens().items())
    days = (datetime.now(UTC).date() - began.date()).days
    wrong = [_wrong_sums(ground, began.date() + timedelta(days=day)) for day in range(days + 1)]
    return {"usage_minus_done_tokens": differences, "usage_sums_that_differ": sum(wrong)}


def _usage(base_url: str, key: str, began: datetime) -> dict[str, int]:
    """Return the sums of a tenant that did nothing before ``began``."""
    asked = {"since": began.replace(minute=0, second=0, microsecond=0).isoformat(), "bucket_width": "1h"}
    answer = httpx.get(f"{base_url}/api/weft/v1/usage", params=asked, headers={"X-API-Key": key}, timeout=60)
    lines = answer.raise_for_status().json()["lines"]
    return {name: sum(line[name] for line in lines) for name in ("train_tokens", "prompt_tokens", "sampled_tokens")}


def _wrong_sums(ground: Ground, day: date) -> int:
    try:
        printed = ground.weft("usage", "verify", "--day", str(day), "--json")
    except subprocess.CalledProcessError as error:
        # Also with sums that differ, which are told all the same.
        printed = str(error.stdout)
        print(printed, error.stderr)
    return len(json.loads(printed)["mismatches"])
