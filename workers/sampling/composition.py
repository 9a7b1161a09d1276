"""The sampling of one base model, put together over the replicas that it is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from contracts.base_model import BaseModelFacts
from contracts.ids import CheckpointId, RunId
from contracts.vocabulary import BaseVocabulary
from ledger.runtime import Runtime
from tenants.checkpoints import directory_of
from tenants.replica_directives import StandingDirective, standing_directives
from workers.leases.pools import PoolHeartbeat
from workers.leases.processes import ProcessKind, new_identity
from workers.sampling.dispatch import Dispatcher
from workers.sampling.gate_cache import GateCache
from workers.sampling.publishing import prepare
from workers.sampling.replica_pool import ReplicaPool
from workers.sampling.replica_sources import ReplicaSource
from workers.sampling.router import Router
from workers.sampling.sample_runner import SampleRunner
from workers.sampling.worker import SamplingWorker


@dataclass(frozen=True, slots=True)
class SamplingParts:
    """The worker, the pool of its replicas, and how versions get onto them and off."""

    worker: SamplingWorker
    pool: ReplicaPool
    runner: SampleRunner
    heartbeat: PoolHeartbeat
    runtime: Runtime

    async def prepare(self, run: RunId, version: CheckpointId) -> None:
        """Load the version beside the run's others wherever it is sampled. Raises ``WeftError``: then none has it."""
        await prepare(self.pool.router, run, version, self.runtime.data_folder.path(directory_of(version)))


def compose_sampling(
    runtime: Runtime, facts: BaseModelFacts, vocabulary: BaseVocabulary, sources: Sequence[ReplicaSource]
) -> SamplingParts:
    """The sampling of one base model on ``sources``; nothing runs yet."""
    settings = runtime.settings
    heartbeat = PoolHeartbeat(
        new_identity(ProcessKind.POOL, facts.name),
        database=runtime.database,
        wakeups=runtime.wakeups,
        clock=runtime.clock,
        lease=settings.lease,
    )
    telemetry = runtime.telemetry.sampling(facts.name)
    pool = ReplicaPool(Router(), sources, partial(_orders, runtime, facts.name))
    runtime.telemetry.metrics.watch_replicas(facts.name, lambda: pool.router.replicas)
    gate_cache = GateCache(facts.name, runtime.database, runtime.clock)
    dispatcher = Dispatcher(
        base_model=facts.name,
        router=pool.router,
        gate_cache=gate_cache,
        database=runtime.database,
        ledger=runtime.ledger,
        data_folder=runtime.data_folder,
        clock=runtime.clock,
        process=heartbeat.identity.id,
    )
    runner = SampleRunner(
        dispatcher=dispatcher,
        router=pool.router,
        gate_cache=gate_cache,
        database=runtime.database,
        feed=runtime.feed,
        continues_on_new_version=settings.swap_policy == "continue",
        telemetry=telemetry,
    )
    worker = SamplingWorker(
        base=facts,
        vocabulary=vocabulary,
        runner=runner,
        gate_cache=gate_cache,
        database=runtime.database,
        ledger=runtime.ledger,
        wakeups=runtime.wakeups,
        heartbeat=heartbeat,
        telemetry=telemetry,
        most_taken=None if runtime.database.has_one_service else settings.pool_samples,
    )
    return SamplingParts(worker, pool, runner, heartbeat, runtime)


async def _orders(runtime: Runtime, base_model: str) -> Mapping[str, StandingDirective]:
    async with runtime.database.read() as session:
        return await standing_directives(session, base_model)
