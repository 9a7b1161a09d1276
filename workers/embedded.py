"""The embedded runner: trainer, sampler and housekeeping of every base model inside one process and event loop."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine.contracts.base_model import BaseModelFacts
from engine.contracts.vocabulary import BaseVocabulary
from engine.training.base import BaseModel
from engine.training.budgets import default_adapter_memory, default_pass_token_budget
from engine.training.trainer import Trainer
from tenants.clock import Clock
from tenants.data_folder import DataFolder
from tenants.database import Database
from tenants.replica_orders import StandingOrder, standing_orders
from tenants.settings import Settings
from workers.compute import ComputeThread
from workers.housekeeping import Housekeeping
from workers.ledger.ledger import Ledger
from workers.ledger.publication import Publication
from workers.ledger.token_feed import TokenFeed
from workers.ledger.wakeups import Wakeups
from workers.sampling.gate_board import GateBoard
from workers.sampling.publishing import prepare
from workers.sampling.replica_pool import ReplicaPool
from workers.sampling.replica_sources import vllm_sources
from workers.sampling.router import Router
from workers.sampling.sample_runner import SampleRunner
from workers.sampling.worker import SamplingWorker
from workers.torch_source import TorchSource
from workers.training.checkpoint_operations import CheckpointOperations
from workers.training.residency import AdapterResidency
from workers.training.statistics import TrainingStatistics
from workers.training.worker import TrainingWorker

log = logging.getLogger(__name__)

PROCESS = "embedded"
"""What ``weft serve`` is called among processes that sample: there is only one."""


@dataclass(frozen=True, slots=True)
class _BaseWorkers:
    """Everything that runs for one base model."""

    training: TrainingWorker
    sampling: SamplingWorker
    pool: ReplicaPool
    compute: ComputeThread


class EmbeddedRunner:
    """Owns the workers of a ``weft serve`` process. Start it, wait for it, stop it."""

    def __init__(
        self,
        *,
        settings: Settings,
        database: Database,
        ledger: Ledger,
        wakeups: Wakeups,
        feed: TokenFeed,
        publication: Publication,
        data_folder: DataFolder,
        clock: Clock,
        bases: Mapping[str, BaseModelFacts],
        vocabularies: Mapping[str, BaseVocabulary],
    ) -> None:
        self._settings = settings
        self._database = database
        self._ledger = ledger
        self._wakeups = wakeups
        self._feed = feed
        self._publication = publication
        self._data_folder = data_folder
        self._clock = clock
        self._bases = bases
        self._vocabularies = vocabularies
        self._workers: list[_BaseWorkers] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._housekeeping = Housekeeping(
            settings=settings,
            database=database,
            ledger=ledger,
            publication=publication,
            data_folder=data_folder,
            clock=clock,
        )

    async def start(self) -> None:
        """Load every base model and start its workers; what was accepted before is taken up. Raises ``WeftError``."""
        await self._housekeeping.remove_orphans()
        for facts in self._bases.values():
            log.info("loading base model %s", facts.name)
            base = await asyncio.to_thread(
                BaseModel.load,
                facts,
                dtype=self._settings.base_dtype,
                device=self._settings.device,
                gradient_checkpointing=self._settings.gradient_checkpointing,
            )
            workers = self._compose(facts, base, self._vocabularies[facts.name])
            await workers.pool.start()
            self._workers.append(workers)
        for workers in self._workers:
            self._tasks.append(asyncio.create_task(workers.training.run(), name="training"))
            self._tasks.append(asyncio.create_task(workers.sampling.run(), name="sampling"))
        self._tasks.append(asyncio.create_task(self._housekeeping.run(), name="housekeeping"))

    def _compose(self, facts: BaseModelFacts, base: BaseModel, vocabulary: BaseVocabulary) -> _BaseWorkers:
        token_budget = self._settings.pass_token_budget or default_pass_token_budget(base)
        memory_bytes = self._settings.adapter_memory_bytes or default_adapter_memory(base)
        statistics = TrainingStatistics()
        trainer = Trainer(base, pass_token_budget=token_budget)
        compute = ComputeThread(f"trainer-{facts.name}")
        residency = AdapterResidency(
            trainer=trainer,
            compute=compute,
            database=self._database,
            ledger=self._ledger,
            data_folder=self._data_folder,
            clock=self._clock,
            snapshot_operations=self._settings.snapshot_operations,
            memory_bytes=memory_bytes,
            statistics=statistics,
        )
        checkpoints = CheckpointOperations(
            trainer=trainer,
            database=self._database,
            ledger=self._ledger,
            data_folder=self._data_folder,
            clock=self._clock,
            residency=residency,
            publication=self._publication,
        )
        training = TrainingWorker(
            base_model=facts.name,
            trainer=trainer,
            compute=compute,
            database=self._database,
            ledger=self._ledger,
            wakeups=self._wakeups,
            residency=residency,
            checkpoints=checkpoints,
            statistics=statistics,
            pass_token_budget=token_budget,
            max_adapters=self._settings.max_adapters,
        )
        sources = vllm_sources(self._settings, facts, self._data_folder) or [TorchSource(base, self._settings)]
        pool = ReplicaPool(Router(), sources, partial(self._orders, facts.name))
        return _BaseWorkers(training, self._sampling(facts, vocabulary, pool.router), pool, compute)

    async def _orders(self, base_model: str) -> Mapping[str, StandingOrder]:
        async with self._database.read() as session:
            return await standing_orders(session, base_model)

    def _sampling(self, facts: BaseModelFacts, vocabulary: BaseVocabulary, router: Router) -> SamplingWorker:
        board = GateBoard(facts.name, self._database, self._clock)
        runner = SampleRunner(
            base=facts,
            router=router,
            board=board,
            database=self._database,
            ledger=self._ledger,
            feed=self._feed,
            data_folder=self._data_folder,
            clock=self._clock,
            process=PROCESS,
            continues_on_new_version=self._settings.swap_policy == "continue",
        )
        self._publication.register(facts.name, partial(prepare, router), runner.withdraw)
        return SamplingWorker(
            base=facts,
            vocabulary=vocabulary,
            runner=runner,
            board=board,
            database=self._database,
            ledger=self._ledger,
            wakeups=self._wakeups,
            process=PROCESS,
        )

    async def stop(self) -> None:
        """Finish the passes in hand, snapshot the adapters, leave the rest to the next start."""
        for workers in self._workers:
            workers.training.stop()
            workers.sampling.stop()
        self._housekeeping.stop()
        ends: Sequence[BaseException | None] = await asyncio.gather(*self._tasks, return_exceptions=True)
        for task, end in zip(self._tasks, ends, strict=True):
            if isinstance(end, BaseException):
                log.error("%s ended with an error", task.get_name(), exc_info=end)
        for workers in self._workers:
            await workers.pool.close()
            await asyncio.to_thread(workers.compute.close)
