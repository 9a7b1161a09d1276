"""The trainer of one base model, put together."""

from dataclasses import dataclass

from engine.model.base import BaseModel
from engine.training.budgets import default_adapter_memory, default_pass_token_budget
from engine.training.executors.group import TrainerGroup
from engine.training.trainer import Trainer
from workers.compute_thread import ComputeThread
from workers.leases.processes import ProcessKind, new_identity
from workers.leases.runs import RunLeases
from workers.runtime import Runtime
from workers.training.checkpoint_operations import CheckpointOperations
from workers.training.residency import AdapterResidency
from workers.training.statistics import TrainingStatistics
from workers.training.worker import TrainingWorker


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """The worker, the leases by which it has its runs, and what computes."""

    worker: TrainingWorker
    leases: RunLeases
    compute: ComputeThread

    def close(self) -> None:
        """Once the worker has ended. Blocking."""
        self.compute.close()


def compose_training(runtime: Runtime, base: BaseModel, group: TrainerGroup | None = None) -> TrainingParts:
    """The trainer of ``base``, which is ``group``'s, whose first rank this is, or this process's own; nothing runs yet."""
    settings = runtime.settings
    ranks = 1 if group is None else group.size
    token_budget = settings.pass_token_budget or ranks * default_pass_token_budget(base)
    statistics, telemetry = TrainingStatistics(), runtime.telemetry.training(base.facts.name)
    trainer = Trainer(base, pass_token_budget=token_budget, executor=group)
    compute = ComputeThread(f"trainer-{base.facts.name}")
    leases = RunLeases(new_identity(ProcessKind.TRAINER, base.facts.name), runtime)
    residency = AdapterResidency(
        trainer=trainer,
        compute=compute,
        database=runtime.database,
        ledger=runtime.ledger,
        data_folder=runtime.data_folder,
        clock=runtime.clock,
        snapshot_operations=settings.snapshot_operations,
        memory_bytes=settings.adapter_memory_bytes or default_adapter_memory(base),
        statistics=statistics,
        telemetry=telemetry,
    )
    runtime.telemetry.metrics.watch_residents(base.facts.name, lambda: len(residency.residents()))
    checkpoints = CheckpointOperations(
        trainer=trainer,
        database=runtime.database,
        ledger=runtime.ledger,
        data_folder=runtime.data_folder,
        clock=runtime.clock,
        residency=residency,
        publication=runtime.publication,
        telemetry=telemetry,
    )
    worker = TrainingWorker(
        base_model=base.facts.name,
        trainer=trainer,
        compute=compute,
        database=runtime.database,
        ledger=runtime.ledger,
        wakeups=runtime.wakeups,
        leases=leases,
        residency=residency,
        checkpoints=checkpoints,
        statistics=statistics,
        telemetry=telemetry,
        pass_token_budget=token_budget,
        max_adapters=settings.max_adapters,
    )
    return TrainingParts(worker, leases, compute)
