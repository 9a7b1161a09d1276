"""``weft pool``: one of a cluster's sampling processes, with the replicas of its base models."""

import asyncio
import logging
import re
from collections.abc import Sequence

from cli.base_models import read_base_models
from cli.cluster_runtime import POOL, open_cluster
from cli.process import keep_pauses_short
from cli.signals import until_asked_to_end
from cli.standard_output import say
from contracts.base_model import BaseModelFacts
from contracts.errors import ProcessMustEnd
from contracts.vocabulary import BaseVocabulary
from engine.sampling.vocabulary import read_vocabulary
from ledger.runtime import Runtime
from store.database import this_host
from store.settings import Settings
from workers.cluster.version_commands import VersionCommandRunner
from workers.sampling.forward_process import ForwardProcess
from workers.sampling.replica_sources import vllm_sources
from workers.sampling.sampler_wiring import BaseSampling, wire_sampling

log = logging.getLogger(__name__)

_VERSION_COMMANDS, _REPLICAS = "version commands", "replicas"
"""Names of the tasks that end only by being cancelled."""


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
                running.append(asyncio.create_task(_version_commands(parts).run(), name=_VERSION_COMMANDS))
                running.append(asyncio.create_task(parts.worker.run(), name="sampling"))
                running.append(asyncio.create_task(parts.pool.until_failed(), name=_REPLICAS))
                cluster.readiness.add(_part(parts.heartbeat.identity.base_model), parts.heartbeat.check)
                say(f"ready; {parts.heartbeat.identity.id} samples {parts.heartbeat.identity.base_model}")
            keep_pauses_short()
            await until_asked_to_end(running)
        except ProcessMustEnd:
            # Nothing is ended in order: the thread that samples may hang.
            for parts in pools:
                await parts.heartbeat.give_up()
            raise
        except BaseException:
            await _end(pools, running)
            raise
        await _end(pools, running)


def _named(settings: Settings) -> Settings:
    """Return the settings with a pool name: the host's name, unless one is set."""
    host = re.sub("[^A-Za-z0-9_.-]", "-", this_host())[:64]
    return settings.model_copy(update={"pool_name": settings.pool_name or host})


def _part(base_model: str) -> str:
    return f"pool of {base_model}"


async def _end(pools: Sequence[BaseSampling], running: "list[asyncio.Task[None]]") -> None:
    for parts in pools:
        parts.worker.stop()
    for task in running:
        if task.get_name() in (_VERSION_COMMANDS, _REPLICAS):
            task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await asyncio.gather(*(parts.pool.close() for parts in pools))


async def _sampling(runtime: Runtime, facts: BaseModelFacts) -> BaseSampling:
    vocabulary = await asyncio.to_thread(read_vocabulary, facts.path)
    settings = runtime.settings
    forward = ForwardProcess(facts, dtype=settings.base_dtype)
    sources = vllm_sources(settings, facts, runtime.data_folder, trains_here=settings.beside_trainer, forward=forward)
    if not sources:
        return await _in_process(runtime, facts, vocabulary)
    return wire_sampling(runtime, facts, vocabulary, sources, forward)


async def _in_process(runtime: Runtime, facts: BaseModelFacts, vocabulary: BaseVocabulary) -> BaseSampling:
    # Imported only without vLLM: torch takes seconds to import, and the base needs its memory.
    from engine.model.base import BaseModel
    from workers.base_forward import BaseForward
    from workers.torch_source import TorchSource

    settings = runtime.settings
    base = await asyncio.to_thread(BaseModel.load, facts, dtype=settings.base_dtype, device=settings.device)
    return wire_sampling(runtime, facts, vocabulary, [TorchSource(base, settings)], BaseForward(base))


def _version_commands(parts: BaseSampling) -> VersionCommandRunner:
    return VersionCommandRunner(parts.heartbeat.identity.id, parts.prepare, parts.withdraw, runtime=parts.runtime)
