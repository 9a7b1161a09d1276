"""The embedded runner of ``weft serve``: trainer, sampler and housekeeping of every base model in one event loop."""

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
from workers.base_forward import BaseForward
from workers.housekeeping.housekeeping import Housekeeping
from workers.housekeeping.presence import PresenceNotes
from workers.jobs.job_process import JobProcess
from workers.jobs.runner import JobRunner
from workers.leases.processes import declare_all_dead
from workers.sampling.replica_sources import vllm_sources
from workers.sampling.sampler_wiring import BaseSampling, wire_sampling
from workers.torch_source import TorchSource
from workers.training.trainer_wiring import TrainingParts, wire_trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _BaseWorkers:
    """The workers of one base model."""

    training: TrainingParts
    sampling: BaseSampling


class EmbeddedRunner:
    """Owner of the workers of a ``weft serve`` process: ``start`` them, ``check`` them, ``stop`` them."""

    def __init__(
        self,
        runtime: Runtime,
        publication: LocalPublication,
        bases: Mapping[str, BaseModelFacts],
        vocabularies: Mapping[str, BaseVocabulary],
    ) -> None:
        """Register the runner's samplers on ``publication``, which must be the runtime's own."""
        self._runtime = runtime
        self._publication = publication
        self._bases = bases
        self._vocabularies = vocabularies
        self._workers: list[_BaseWorkers] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._has_given_up = False
        self._presence = PresenceNotes(runtime)
        self._housekeeping = Housekeeping(runtime, self._may_declare_dead)
        self._loaded: dict[str, BaseModel] = {}
        self._jobs = JobRunner(runtime, self._loaded, JobProcess())

    async def start(self) -> None:
        """Load every base model and start its workers, which go on with operations of earlier runs. Raises ``WeftError``."""
        database, settings = self._runtime.database, self._runtime.settings
        if database.has_one_service:
            async with database.write() as transaction:
                await declare_all_dead(transaction)
            await self._jobs.free_all()
        for facts in self._bases.values():
            log.info("loading base model %s", facts.name)
            base = await asyncio.to_thread(
                BaseModel.load,
                facts,
                dtype=settings.base_dtype,
                device=settings.device,
                gradient_checkpointing=settings.gradient_checkpointing,
            )
            self._loaded[facts.name] = base
            workers = self._compose(facts, base)
            await workers.sampling.pool.start()
            self._workers.append(workers)
        for workers in self._workers:
            self._tasks.append(asyncio.create_task(workers.training.worker.run(), name="training"))
            self._tasks.append(asyncio.create_task(workers.sampling.worker.run(), name="sampling"))
        self._tasks.append(asyncio.create_task(self._housekeeping.run(), name="housekeeping"))
        self._tasks.append(asyncio.create_task(self._jobs.run(), name="jobs"))
        self._tasks.append(asyncio.create_task(self._presence.run(self._stopping), name="presence"))

    def _compose(self, facts: BaseModelFacts, base: BaseModel) -> _BaseWorkers:
        settings = self._runtime.settings
        forward = BaseForward(base)
        sources = vllm_sources(settings, facts, self._runtime.data_folder, trains_here=True, forward=forward) or [
            TorchSource(base, settings)
        ]
        sampling = wire_sampling(self._runtime, facts, self._vocabularies[facts.name], sources, forward)
        self._publication.register(facts.name, sampling.prepare, sampling.withdraw)
        return _BaseWorkers(wire_trainer(self._runtime, base), sampling)

    def _may_declare_dead(self) -> bool:
        return any(workers.training.leases.may_declare_dead for workers in self._workers)

    async def check(self) -> None:
        """Raise ``NotReady`` unless every worker runs."""
        if not self._tasks:
            raise NotReady("the base models are being loaded")
        if ended := [task.get_name() for task in self._tasks if task.done()]:
            raise NotReady(f"ended: {', '.join(ended)}")
        for workers in self._workers:
            if (weights := workers.training.leases.weights) is not None:
                weights.check()

    async def until_failed(self) -> None:
        """Return when a worker has ended by itself, which none should, and raise its error."""
        watches = [asyncio.create_task(workers.sampling.pool.until_failed()) for workers in self._workers]
        try:
            done, _ = await asyncio.wait([*self._tasks, *watches], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            for watch in watches:
                watch.cancel()

    async def give_up(self) -> None:
        """Leave everything to the next process at once, when the device has failed. Threads that hang are not waited for."""
        self._has_given_up = True
        for workers in self._workers:
            await workers.training.leases.releases.give_up()
            await workers.sampling.heartbeat.give_up()

    async def stop(self) -> None:
        """Finish the passes in hand and snapshot the adapters; other operations wait for the next start."""
        if self._has_given_up:
            return
        for workers in self._workers:
            workers.training.worker.stop()
            workers.sampling.worker.stop()
        self._housekeeping.stop()
        self._jobs.stop()
        self._stopping.set()
        ends: Sequence[BaseException | None] = await asyncio.gather(*self._tasks, return_exceptions=True)
        for task, end in zip(self._tasks, ends, strict=True):
            if isinstance(end, BaseException):
                log.error("%s ended with an error", task.get_name(), exc_info=end)
        for workers in self._workers:
            await workers.sampling.pool.close()
            await asyncio.to_thread(workers.training.close)
