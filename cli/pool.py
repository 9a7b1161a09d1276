"""``weft pool``: sampling replicas of base models, and what sends samples to them."""

import asyncio
import logging
import re

import typer

from cli.base_models import read_base_models
from cli.cluster_runtime import POOL, open_cluster
from cli.process import keep_pauses_short
from cli.signals import until_asked_to_end
from contracts.base_model import BaseModelFacts
from engine.sampling.vocabulary import read_vocabulary
from ledger.runtime import Runtime
from store.database import this_host
from store.settings import Settings
from workers.cluster.version_commands import VersionCommandRunner
from workers.sampling.composition import SamplingParts, compose_sampling
from workers.sampling.replica_sources import ReplicaSource, vllm_sources

log = logging.getLogger(__name__)


async def sample(settings: Settings) -> None:
    """Sample until SIGINT or SIGTERM. Raises ``WeftError`` when it cannot start."""
    bases = read_base_models(settings)
    settings = _named(settings)
    async with open_cluster(settings, POOL, bases) as cluster:
        for base_model in bases:
            cluster.readiness.expect(_part(base_model), f"starting: loading base model {base_model}")
        pools = [await _sampling(cluster.runtime, facts) for facts in bases.values()]
        running: list[asyncio.Task[None]] = []
        try:
            for parts in pools:
                await parts.pool.start()
                running.append(asyncio.create_task(_orders(parts).run(), name="version orders"))
                running.append(asyncio.create_task(parts.worker.run(), name="sampling"))
                cluster.readiness.add(_part(parts.heartbeat.identity.base_model), parts.heartbeat.check)
                typer.echo(f"ready; {parts.heartbeat.identity.id} samples {parts.heartbeat.identity.base_model}")
            keep_pauses_short()
            await until_asked_to_end(running)
        finally:
            for parts in pools:
                parts.worker.stop()
            await _ended(running)
            await asyncio.gather(*(parts.pool.close() for parts in pools))


def _named(settings: Settings) -> Settings:
    """With a name for the pool: its host's, unless it has one."""
    host = re.sub("[^A-Za-z0-9_.-]", "-", this_host())[:64]
    return settings.model_copy(update={"pool_name": settings.pool_name or host})


def _part(base_model: str) -> str:
    return f"pool of {base_model}"


async def _ended(running: "list[asyncio.Task[None]]") -> None:
    for task in running:
        if task.get_name() == "version orders":
            task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _sampling(runtime: Runtime, facts: BaseModelFacts) -> SamplingParts:
    vocabulary = await asyncio.to_thread(read_vocabulary, facts.path)
    sources = vllm_sources(runtime.settings, facts, runtime.data_folder) or [await _in_process(runtime.settings, facts)]
    return compose_sampling(runtime, facts, vocabulary, sources)


async def _in_process(settings: Settings, facts: BaseModelFacts) -> ReplicaSource:
    # Only where there is no vLLM: torch takes seconds to import, and the base its memory.
    from engine.model.base import BaseModel
    from workers.torch_source import TorchSource

    base = await asyncio.to_thread(BaseModel.load, facts, dtype=settings.base_dtype, device=settings.device)
    return TorchSource(base, settings)


def _orders(parts: SamplingParts) -> VersionCommandRunner:
    runtime = parts.runtime
    return VersionCommandRunner(
        parts.heartbeat.identity.id,
        parts.prepare,
        parts.runner.withdraw,
        database=runtime.database,
        wakeups=runtime.wakeups,
        clock=runtime.clock,
    )
