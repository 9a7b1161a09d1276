"""Wiring of the sampling of one base model: worker, replicas and everything between them, built from a ``Runtime``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from contracts.base_model import BaseModelFacts
from contracts.ids import CheckpointId, RunId
from contracts.vocabulary import BaseVocabulary
from engine.sampling.handshake import Handshake
from engine.sampling.trainer_forward import TrainerForward
from ledger.runtime import Runtime
from store.sampled_bases import sampled_facts, takes_head
from store.tables import ProcessKind
from tenants.checkpoints import directory_of
from tenants.replica_directives import StandingDirective, standing_directives
from tenants.shares import owner_of_run
from workers.leases.base_weights import WeightsCheck
from workers.leases.pools import PoolHeartbeat
from workers.leases.processes import new_identity
from workers.sampling.claims import SampleClaims
from workers.sampling.dispatch import Dispatcher
from workers.sampling.gate_cache import GateCache
from workers.sampling.gate_cuts import GateCuts
from workers.sampling.in_flight_rows import InFlightRows
from workers.sampling.open_attempts import OpenAttempts
from workers.sampling.publishing import prepare, withdraw
from workers.sampling.replica_pool import ReplicaPool
from workers.sampling.replica_sources import ExternalVllm, ManagedVllm, ReplicaSource
from workers.sampling.router import Router
from workers.sampling.sample_runner import SampleRunner
from workers.sampling.swap import Swap
from workers.sampling.worker import SamplingWorker


@dataclass(frozen=True, slots=True)
class BaseSampling:
    """The sampling of one base model in one process."""

    worker: SamplingWorker
    pool: ReplicaPool
    attempts: OpenAttempts
    heartbeat: PoolHeartbeat
    runtime: Runtime

    async def prepare(self, run: RunId, version: CheckpointId) -> None:
        """Load the version on every replica that samples the run. Raises ``WeftError``, and then no replica has the version."""
        async with self.runtime.database.read() as session:
            owner = await owner_of_run(session, run)
        directory = self.runtime.data_folder.path(directory_of(version))
        await prepare(self.pool.router, run, version, directory, owner)

    async def withdraw(self, version: CheckpointId) -> None:
        """Unload the version from every replica once no sample uses it."""
        await withdraw(self.pool.router, self.attempts, version)


def wire_sampling(
    runtime: Runtime,
    facts: BaseModelFacts,
    vocabulary: BaseVocabulary,
    sources: Sequence[ReplicaSource],
    forward: TrainerForward | None = None,
) -> BaseSampling:
    """Build the sampling of one base model on ``sources``, and start nothing.

    ``forward``: replicas are compared with it before they take work; None compares none. The pool closes it.
    """
    weights = WeightsCheck(runtime, facts.name, facts.path)
    identity = new_identity(ProcessKind.POOL, facts.name, runtime.settings.pool_samples)
    heartbeat = PoolHeartbeat(identity, runtime, weights)
    telemetry = runtime.telemetry.sampling(facts.name)
    router = Router()
    pool = ReplicaPool(
        router,
        sources,
        partial(_directives, runtime, facts.name),
        None if forward is None else _handshake(runtime, facts, sources, forward),
    )
    runtime.telemetry.metrics.watch_replicas(facts.name, lambda: router.replicas)
    gate_cache = GateCache(runtime, facts.name)
    attempts = OpenAttempts(router, gate_cache)
    rows = InFlightRows(runtime, facts.name, heartbeat.identity.id)
    dispatcher = Dispatcher(runtime, attempts, rows, router, gate_cache)
    swap = Swap(runtime, attempts, telemetry)
    claims = SampleClaims(runtime, heartbeat, router, gate_cache)
    runner = SampleRunner(runtime, attempts, rows, dispatcher, swap, claims, router, telemetry)
    gate_cuts = GateCuts(gate_cache, attempts, telemetry)
    sampled = sampled_facts(runtime.settings, facts)
    worker = SamplingWorker(runtime, sampled, vocabulary, runner, gate_cuts, swap, claims, telemetry)
    return BaseSampling(worker, pool, attempts, heartbeat, runtime)


def _handshake(
    runtime: Runtime, facts: BaseModelFacts, sources: Sequence[ReplicaSource], forward: TrainerForward
) -> Handshake:
    settings = runtime.settings
    heads = takes_head(settings, facts)
    on_vllm = any(isinstance(source, ExternalVllm | ManagedVllm) for source in sources)
    return Handshake(
        forward,
        runtime.data_folder.path("handshakes"),
        vocabulary_size=facts.vocabulary_size,
        max_rank=settings.max_rank,
        with_head=heads or not on_vllm,
        tolerance=settings.sampler_tolerance,
        # Servers with adapted heads have their prompts scored by this same forward.
        scores=not (heads and on_vllm),
    )


async def _directives(runtime: Runtime, base_model: str) -> Mapping[str, StandingDirective]:
    async with runtime.database.read() as session:
        return await standing_directives(session, base_model)
