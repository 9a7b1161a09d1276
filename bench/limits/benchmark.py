"""Limits under repeats, lost answers and a killed process, and what they cost: ``python -m bench.limits``.

Starts a PostgreSQL, a Redis and ``weft up`` with three APIs, a trainer and a pool. Tenants with rates of training and of
samples, with a key and a project that have rates of half as much, and with a budget, send through a proxy that drops answers:
every request comes up to three times. One API is killed meanwhile. Then the same with Redis stopped. Last, tenants with limits,
with limits and rates of keys and projects too, and without take turns at sending training that nothing computes, and the
requests accepted a second are compared. Prints one JSON line.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import uvloop

from bench.clients.weft_client import WeftClient, sample_body
from bench.limits.accounts import Verdict, audit, pending
from bench.limits.bounded_tenants import PROJECT, bound, bound_parts, suspended_runs
from bench.limits.dropping_proxy import DroppingProxy
from bench.workload import RANK
from engine.model.tiny_model import write_tiny_model
from testing.cluster_process import ClusterProcess, RedisProcess
from testing.postgres_process import PostgresProcess
from testing.tenants import make_tenants

BASE = "weft/tiny"
LENGTH = 16
_A_MINUTE, _BURST = 4800, 160
_PROMPT = list(range(8))
_UNBOUNDED = 10**12
_PATIENCE_SECONDS = 180.0
_REPEAT_SECONDS = 0.2
_KILL_AFTER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the load: ``clients`` of ``tenants`` send ``operations`` each. ``turns`` of ``seconds`` compare the intake."""

    tenants: int = 8
    clients: int = 64
    operations: int = 12
    turns: int = 8
    seconds: float = 5.0


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (("tenants", int), ("clients", int), ("operations", int), ("turns", int), ("seconds", float)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Size(), name))
    size = Size(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory(prefix="weft-limits-") as folder, ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(Path(folder) / "redis"))
        postgres = stack.enter_context(PostgresProcess())
        write_tiny_model(Path(folder) / "tiny")
        cluster = ClusterProcess(
            data=Path(folder) / "data",
            base_models=[f"{BASE}={Path(folder) / 'tiny'}"],
            database_url=postgres.url().replace("postgresql://", "postgresql+asyncpg://"),
            redis_url=redis.url,
            options=["--apis", "3", "--trainers", "1", "--pools", "1"],
            environment={"OMP_NUM_THREADS": "1"},
        )
        stack.enter_context(cluster)
        found = uvloop.run(measured(cluster, redis, Path(folder) / "data", size))
    print(json.dumps(found))


async def measured(cluster: ClusterProcess, redis: RedisProcess, data: Path, size: Size) -> dict[str, float]:
    """Return all figures."""
    figures: dict[str, float] = {}
    for suffix in ("", "_without_redis"):
        if suffix:
            redis.kill()
        verdict = await struck(cluster, data, f"tenant{suffix}", size)
        figures |= {f"{name}{suffix}": value for name, value in verdict.figures().items()}
        print(f"{suffix or 'with redis'}: {verdict.figures()}", flush=True)
    redis.start()
    return figures | await intake(cluster, data, size)


async def struck(cluster: ClusterProcess, data: Path, prefix: str, size: Size) -> Verdict:
    """Have tenants with limits send through the proxy while an API is killed, and return what their accounts say."""
    names = [f"{prefix}-{number}" for number in range(size.tenants)]
    keys = await asyncio.to_thread(make_tenants, data, names, database_url=cluster.database_url)
    each = size.clients // size.tenants
    await bound(cluster.database_url, names, a_minute=_A_MINUTE, burst=_BURST)
    slow = await bound_parts(cluster.database_url, names, a_minute=_A_MINUTE // 2, burst=_BURST // 2)
    async with DroppingProxy(cluster.base_url) as proxy:
        sending = []
        for number in range(each * size.tenants):
            tenant, place = divmod(number, each)
            # All pairs of work, of a key with a rate or without, and of a project with one or without.
            work = train if place % 2 else draw
            key = (keys if place // 2 % 2 else slow)[tenant]
            project = None if (place + place // 4) % 2 else PROJECT
            sending.append(work(proxy.base_url, key, size.operations, project))
        killing = asyncio.create_task(kill_one(cluster))
        sent = sum(await asyncio.gather(*sending))
        await killing
        dropped = proxy.dropped
    await until_done(cluster, names)
    verdict = await asyncio.to_thread(audit, cluster, names, sent=sent)
    print(f"{sent} requests, {dropped} answers dropped", flush=True)
    return verdict


async def train(url: str, key: str, operations: int, project: str | None) -> int:
    """Make a run and send passes of it, each until it is answered; return their number."""
    async with WeftClient(url, key) as client:
        opened = await until_answered(client, "create_session", sdk_version="bench", project_id=project)
        session = opened["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": RANK, "seed": 0}}
        run = (await until_answered(client, "create_model", **asked))["model_id"]
        for seq_id in range(1, operations + 1):
            await until_answered(client, "forward_backward", **a_pass(run, seq_id))
    return operations


async def draw(url: str, key: str, operations: int, project: str | None) -> int:
    """Send samples, each until it is answered, and return their number."""
    async with WeftClient(url, key) as client:
        opened = await until_answered(client, "create_session", sdk_version="bench", project_id=project)
        session = opened["session_id"]
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = (await until_answered(client, "create_sampling_session", **asked))["sampling_session_id"]
        for seq_id in range(operations):
            body = sample_body(sampler, seq_id, _PROMPT, max_tokens=40, seed=seq_id)
            # Most end before they have taken what they reserve.
            body["sampling_params"]["stop"] = list(range(64))
            await until_answered(client, "asample", **body)
    return operations


async def until_answered(client: WeftClient, endpoint: str, **body: Any) -> dict[str, Any]:
    """Repeat a request until its answer comes, as the SDK does."""
    ends = monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return await client.post(endpoint, **body)
        except (aiohttp.ClientError, RuntimeError):
            if monotonic() > ends:
                raise
            await asyncio.sleep(_REPEAT_SECONDS)


def a_pass(run: str, seq_id: int) -> dict[str, Any]:
    """Return the body of a ``forward_backward`` of ``LENGTH`` tokens."""
    tokens = [(seq_id + place) % 200 for place in range(LENGTH)]
    inputs = {
        "target_tokens": {"data": tokens, "dtype": "int64", "shape": [LENGTH]},
        "weights": {"data": [1.0] * LENGTH, "dtype": "float32", "shape": [LENGTH]},
    }
    datum = {"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": inputs}
    batch = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": run, "seq_id": seq_id, "forward_backward_input": batch}


async def kill_one(cluster: ClusterProcess) -> None:
    """Kill an API while requests come."""
    await asyncio.sleep(_KILL_AFTER_SECONDS)
    apis = await asyncio.to_thread(cluster.children, "api")
    cluster.kill_child(apis[0])


async def until_done(cluster: ClusterProcess, names: Sequence[str]) -> None:
    """Wait until nothing of the tenants is pending. Raises ``TimeoutError``."""
    ends = monotonic() + _PATIENCE_SECONDS
    while left := await asyncio.to_thread(pending, cluster, names):
        if monotonic() > ends:
            raise TimeoutError(f"{left} operations are pending after {_PATIENCE_SECONDS:.0f} s")
        await asyncio.sleep(_REPEAT_SECONDS)


async def intake(cluster: ClusterProcess, data: Path, size: Size) -> dict[str, float]:
    """Return the requests accepted a second of tenants with limits, of tenants without, and their ratio, in turns.

    ``intake_ratio_of_parts``: of tenants whose keys and projects have rates, too. The tenants are suspended: their work is
    accepted, and nothing of it is computed.
    """
    groups: list[list[tuple[str, str]]] = []
    for prefix in ("bounded", "parts", "free"):
        names = [f"{prefix}-{number}" for number in range(size.clients)]
        keys = await asyncio.to_thread(make_tenants, data, names, database_url=cluster.database_url)
        inside = PROJECT if prefix == "parts" else None
        runs = await suspended_runs(cluster.database_url, names, BASE, inside)
        if prefix != "free":
            await bound(cluster.database_url, names, a_minute=_UNBOUNDED, burst=_UNBOUNDED)
        if prefix == "parts":
            keys = await bound_parts(cluster.database_url, names, a_minute=_UNBOUNDED, burst=_UNBOUNDED)
        groups.append(list(zip(keys, runs, strict=True)))
    next_seq_ids = [[1] * size.clients for _ in groups]
    rates: list[list[float]] = [[] for _ in groups]
    for turn in range(size.turns):
        for place in ((0, 1, 2), (2, 1, 0))[turn % 2]:
            ends = monotonic() + size.seconds
            senders = zip(groups[place], next_seq_ids[place], strict=True)
            sending = [accepted(cluster.base_url, key, run, first, ends) for (key, run), first in senders]
            counts = await asyncio.gather(*sending)
            next_seq_ids[place] = [old + new for old, new in zip(next_seq_ids[place], counts, strict=True)]
            rates[place].append(sum(counts) / size.seconds)
        on, parts, off = (group[-1] for group in rates)
        print(
            f"turn {turn}: with limits {on:.0f}/s, of keys and projects too {parts:.0f}/s, without {off:.0f}/s",
            flush=True,
        )
    # The first turn warms up. A ratio within each turn: the machine is not as fast in the next.
    with_limits, with_parts, without = (group[1:] for group in rates)
    figures = {"intake_on": with_limits, "intake_parts": with_parts, "intake_off": without}
    figures["intake_ratio"] = [on / off for on, off in zip(with_limits, without, strict=True)]
    figures["intake_ratio_of_parts"] = [on / off for on, off in zip(with_parts, without, strict=True)]
    return {name: statistics.median(values) for name, values in figures.items()}


async def accepted(url: str, key: str, run: str, seq_id: int, ends: float) -> int:
    """Send passes one after another until then, and return how many were accepted."""
    count = 0
    async with WeftClient(url, key) as client:
        while monotonic() < ends:
            await client.post("forward_backward", **a_pass(run, seq_id + count))
            count += 1
    return count
