"""Wiring of one base model's trainer: engine, leases and worker, built from the process's runtime."""

import os
from dataclasses import dataclass

import torch

from engine.model.base import BaseModel
from engine.training.budgets import default_pass_token_budget
from engine.training.executors.group import TrainerGroup
from engine.training.executors.micro_batch_process import BaseOrder
from engine.training.executors.micro_batch_processes import MOST_PARAMETERS, MicroBatchProcesses
from engine.training.trainer import Trainer
from store.settings import Settings
from workers.compute_thread import ComputeThread
from workers.leases.processes import ProcessKind, new_identity
from workers.leases.runs import RunLeases
from workers.runtime import Runtime
from workers.training.training_engine import TrainingEngine
from workers.training.worker import TrainingWorker


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """Worker of one base model, its leases on runs, and the threads and processes to close after it."""

    worker: TrainingWorker
    leases: RunLeases
    compute: ComputeThread
    processes: MicroBatchProcesses | None

    def close(self) -> None:
        """End the compute thread, once the worker has ended. Blocking."""
        self.compute.close()
        if self.processes is not None:
            self.processes.close()


def wire_trainer(runtime: Runtime, base: BaseModel, group: TrainerGroup | None = None) -> TrainingParts:
    """Build the trainer of ``base``; nothing runs yet.

    ``group`` is the distributed group that computes, whose rank 0 this process is; None: this process computes alone.
    """
    settings = runtime.settings
    ranks = 1 if group is None else group.size
    token_budget = settings.pass_token_budget or ranks * default_pass_token_budget(base)
    processes = None if group is not None else _processes(base, settings)
    trainer = Trainer(base, pass_token_budget=token_budget, executor=group or processes)
    compute = ComputeThread(f"trainer-{base.facts.name}")
    engine = TrainingEngine(trainer, compute, runtime.telemetry.training(base.facts.name), token_budget)
    worker = wire_worker(runtime, engine)
    runtime.telemetry.metrics.watch_residents(base.facts.name, lambda: len(worker.residency.residents()))
    return TrainingParts(worker, worker.leases, compute, processes)


def wire_worker(runtime: Runtime, engine: TrainingEngine) -> TrainingWorker:
    """Build the worker of ``engine``'s base model, with a new identity among the trainers."""
    leases = RunLeases(
        new_identity(ProcessKind.TRAINER, engine.base_model),
        database=runtime.database,
        wakeups=runtime.wakeups,
        clock=runtime.clock,
        lease=runtime.settings.lease,
        moved=runtime.telemetry.metrics.lease_moved,
    )
    return TrainingWorker(runtime, engine, leases)


def _processes(base: BaseModel, settings: Settings) -> MicroBatchProcesses | None:
    """Return processes for a base so small that threads would wait for each other's Python; None for larger bases."""
    parameters = sum(parameter.numel() for parameter in base.model.parameters())
    if base.device.type != "cpu" or torch.get_num_threads() < 2 or parameters > MOST_PARAMETERS:
        return None
    if not hasattr(os, "memfd_create"):
        # Shared memory without a file is needed, which only Linux has.
        return None
    return MicroBatchProcesses(
        base, BaseOrder(base.facts, settings.base_dtype, gradient_checkpointing=settings.gradient_checkpointing)
    )
