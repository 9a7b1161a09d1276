"""The trainer of one base model, put together."""

import os
from dataclasses import dataclass

import torch

from engine.model.base import BaseModel
from engine.training.budgets import default_adapter_memory, default_pass_token_budget
from engine.training.executors.group import TrainerGroup
from engine.training.executors.micro_batch_process import BaseOrder
from engine.training.executors.micro_batch_processes import MOST_PARAMETERS, MicroBatchProcesses
from engine.training.trainer import Trainer
from ledger.runtime import Runtime
from store.settings import Settings
from workers.compute_thread import ComputeThread
from workers.leases.processes import ProcessKind, new_identity
from workers.leases.runs import RunLeases
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
    processes: MicroBatchProcesses | None

    def close(self) -> None:
        """Once the worker has ended. Blocking."""
        self.compute.close()
        if self.processes is not None:
            self.processes.close()


def compose_training(runtime: Runtime, base: BaseModel, group: TrainerGroup | None = None) -> TrainingParts:
    """The trainer of ``base``, which is ``group``'s, whose first rank this is, or this process's own; nothing runs yet."""
    settings = runtime.settings
    ranks = 1 if group is None else group.size
    token_budget = settings.pass_token_budget or ranks * default_pass_token_budget(base)
    statistics, telemetry = TrainingStatistics(), runtime.telemetry.training(base.facts.name)
    processes = None if group is not None else _processes(base, settings)
    trainer = Trainer(base, pass_token_budget=token_budget, executor=group or processes)
    compute = ComputeThread(f"trainer-{base.facts.name}")
    leases = RunLeases(
        new_identity(ProcessKind.TRAINER, base.facts.name),
        database=runtime.database,
        wakeups=runtime.wakeups,
        clock=runtime.clock,
        lease=settings.lease,
        moved=runtime.telemetry.metrics.lease_moved,
    )
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
    return TrainingParts(worker, leases, compute, processes)


def _processes(base: BaseModel, settings: Settings) -> MicroBatchProcesses | None:
    """For a base so small that threads would wait for each other's Python."""
    parameters = sum(parameter.numel() for parameter in base.model.parameters())
    if base.device.type != "cpu" or torch.get_num_threads() < 2 or parameters > MOST_PARAMETERS:
        return None
    if not hasattr(os, "memfd_create"):
        # Memory without a file that processes share: Linux has it.
        return None
    return MicroBatchProcesses(
        base, BaseOrder(base.facts, settings.base_dtype, gradient_checkpointing=settings.gradient_checkpointing)
    )
