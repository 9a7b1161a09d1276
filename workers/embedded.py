"""The embedded runner: trainer, sampler and housekeeping of every base model inside one process and event loop."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contracts.base_model import BaseModelFacts
from contracts.vocabulary import BaseVocabulary
from engine.model.base import BaseModel
from ledger.publication import LocalPublication
from ledger.runtime import Runtime
from telemetry.readiness import NotReady
from workers.housekeeping import Housekeeping
from workers.leases.processes import declare_all_dead
from workers.sampling.composition import SamplingParts, compose_sampling
from workers.sampling.replica_sources import vllm_sources
from workers.torch_source import TorchSource
from workers.training.composition import TrainingParts, compose_training

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _BaseWorkers:
    """Everything that runs for one base model."""

    training: TrainingParts
    sampling: SamplingParts


class EmbeddedRunner:
    """Owns the workers of a ``weft serve`` process. Start it, wait for it, stop it."""

    def __init__(
        self,
        runtime: Runtime,
        publication: LocalPublication,
        bases: Mapping[str, BaseModelFacts],
        vocabularies: Mapping[str, BaseVocabulary],
    ) -> None:
        """``publication`` is the runtime's."""
        self._fabric = runtime
        self._publication = publication
        self._bases = bases
        self._vocabularies = vocabularies
        self._workers: list[_BaseWorkers] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._housekeeping = Housekeeping(runtime, self._may_judge)

    async def start(self) -> None:
        """Load every base model and start its workers; what was accepted before is taken up. Raises ``WeftError``."""
        database, settings = self._fabric.database, self._fabric.settings
        if database.has_one_service:
            async with database.write() as transaction:
                await declare_all_dead(transaction)
            await self._housekeeping.remove_orphans()
        for facts in self._bases.values():
            log.info("loading base model %s", facts.name)
            base = await asyncio.to_thread(
                BaseModel.load,
                facts,
                dtype=settings.base_dtype,
                device=settings.device,
                gradient_checkpointing=settings.gradient_checkpointing,
            )
            workers = self._compose(facts, base)
            await workers.sampling.pool.start()
            self._workers.append(workers)
        for workers in self._workers:
            self._tasks.append(asyncio.create_task(workers.training.worker.run(), name="training"))
            self._tasks.append(asyncio.create_task(workers.sampling.worker.run(), name="sampling"))
        self._tasks.append(asyncio.create_task(self._housekeeping.run(), name="housekeeping"))

    def _compose(self, facts: BaseModelFacts, base: BaseModel) -> _BaseWorkers:
        settings = self._fabric.settings
        sources = vllm_sources(settings, facts, self._fabric.data_folder) or [TorchSource(base, settings)]
        sampling = compose_sampling(self._fabric, facts, self._vocabularies[facts.name], sources)
        self._publication.register(facts.name, sampling.prepare, sampling.runner.withdraw)
        return _BaseWorkers(compose_training(self._fabric, base), sampling)

    def _may_judge(self) -> bool:
        return any(workers.training.leases.may_judge for workers in self._workers)

    async def check(self) -> None:
        """Every worker is at work. Raises ``NotReady``."""
        if not self._tasks:
            raise NotReady("the base models are being loaded")
        if ended := [task.get_name() for task in self._tasks if task.done()]:
            raise NotReady(f"ended: {', '.join(ended)}")

    async def stop(self) -> None:
        """Finish the passes in hand, snapshot the adapters, leave the rest to the next start."""
        for workers in self._workers:
            workers.training.worker.stop()
            workers.sampling.worker.stop()
        self._housekeeping.stop()
        ends: Sequence[BaseException | None] = await asyncio.gather(*self._tasks, return_exceptions=True)
        for task, end in zip(self._tasks, ends, strict=True):
            if isinstance(end, BaseException):
                log.error("%s ended with an error", task.get_name(), exc_info=end)
        for workers in self._workers:
            await workers.sampling.pool.close()
            await asyncio.to_thread(workers.training.close)
