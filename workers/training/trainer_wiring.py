"""Wiring of one base model's trainer: engine, leases and worker, built from the process's runtime."""

from dataclasses import dataclass

from engine.model.base import BaseModel
from engine.model.device import SelfTest
from engine.training.budgets import default_pass_token_budget
from engine.training.executors.group import TrainerGroup
from engine.training.trainer import Trainer
from ledger.runtime import Runtime
from store.tables import ProcessKind
from workers.compute_thread import ComputeThread
from workers.leases.base_weights import WeightsCheck
from workers.leases.processes import new_identity
from workers.leases.runs import RunLeases
from workers.training.training_engine import TrainingEngine
from workers.training.worker import TrainingWorker


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """Worker of one base model, its leases on runs, and the compute thread to close after it."""

    worker: TrainingWorker
    leases: RunLeases
    compute: ComputeThread

    def close(self) -> None:
        """End the compute thread, once the worker has ended. Blocking."""
        self.compute.close()


def wire_trainer(runtime: Runtime, base: BaseModel, group: TrainerGroup | None = None) -> TrainingParts:
    """Build the trainer of ``base``; nothing runs yet.

    ``group`` is the distributed group that computes, whose rank 0 this process is; None: this process computes alone.
    """
    settings = runtime.settings
    ranks = 1 if group is None else group.size
    token_budget = settings.pass_token_budget or ranks * default_pass_token_budget(base)
    trainer = Trainer(base, pass_token_budget=token_budget, executor=group)
    compute = ComputeThread(f"trainer-{base.facts.name}")
    self_test = SelfTest(base) if group is None else None
    engine = TrainingEngine(trainer, compute, runtime.telemetry.training(base.facts.name), token_budget, self_test)
    worker = wire_worker(runtime, engine)
    metrics = runtime.telemetry.metrics
    metrics.watch_residents(base.facts.name, lambda: len(worker.residency.residents()))
    metrics.watch_micro_batches(base.facts.name, lambda: trainer.memory.most or 0)
    return TrainingParts(worker, worker.leases, compute)


def wire_worker(runtime: Runtime, engine: TrainingEngine) -> TrainingWorker:
    """Build the worker of ``engine``'s base model, with a new identity among the trainers."""
    limit, clock = runtime.settings.stall_limit.total_seconds(), engine.compute.clock
    identity = new_identity(ProcessKind.TRAINER, engine.base_model, engine.slot_token_budget)
    weights = WeightsCheck(runtime, engine.base_model, engine.trainer.base.facts.path)
    leases = RunLeases(identity, runtime, may_renew=lambda: clock.longest() <= limit, weights=weights)
    return TrainingWorker(runtime, engine, leases)
