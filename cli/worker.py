"""``weft worker``: one trainer for each base model, and housekeeping, driven by Celery tasks.

Started by ``torchrun``, it is one rank of the trainer of one base model.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from uuid import uuid4

from cli.base_models import read_base_models
from cli.cluster_runtime import WORKER, ClusterRuntime, open_cluster
from cli.process import keep_pauses_short
from cli.signals import until_asked_to_end
from cli.standard_output import say
from cli.trainer_group import follow, join_group, load_base
from contracts.base_model import BaseModelFacts
from contracts.errors import ProcessMustEnd
from engine.model.base import BaseModel
from engine.training.executors.group import TrainerGroup
from ledger.runtime import Runtime
from ledger.wakeups import placements_topic
from store.settings import Settings
from workers.cluster.celery_app import ANNOUNCE, HOUSEKEEPING, JOBS, PLACE, step_task, training_queue
from workers.cluster.celery_worker import CeleryWorker, Handler
from workers.cluster.job_looks import JobLooks
from workers.cluster.placements import PlacementAnnouncer
from workers.housekeeping.housekeeping import Housekeeping
from workers.housekeeping.schedule import StepName
from workers.jobs.job_process import JobProcess
from workers.jobs.runner import JobRunner
from workers.training.trainer_wiring import TrainingParts, wire_trainer

log = logging.getLogger(__name__)

_LAST_SECONDS = 10.0
"""Time for the other trainers of a process to end in order when the device of one has failed."""


async def work(settings: Settings) -> None:
    """Train and do housekeeping until SIGINT or SIGTERM.

    Raises ``WeftError`` when it cannot start, and ``GroupLost`` when it is a rank of a group and another rank is gone.
    """
    bases = read_base_models(settings)
    group = await join_group(settings, len(bases))
    if group is not None and not group.leads:
        (facts,) = bases.values()
        await follow(group, facts, settings)
        return
    async with open_cluster(settings, WORKER, bases) as cluster:
        runtime = cluster.runtime
        for base_model in bases:
            cluster.readiness.expect(_part(base_model), f"starting: loading base model {base_model}")
        loaded: dict[str, BaseModel] = {}
        trainers = [await _trainer(runtime, facts, group, loaded) for facts in bases.values()]
        running = [asyncio.create_task(parts.worker.run(), name="training") for parts in trainers]
        for parts in trainers:
            cluster.readiness.add(_part(parts.leases.identity.base_model), parts.leases.check)
        jobs = JobRunner(runtime, loaded, JobProcess())
        celery = _celery_worker(
            cluster, list(bases), jobs, lambda: any(parts.leases.may_declare_dead for parts in trainers)
        )
        celery.start()
        keep_pauses_short()
        for parts in trainers:
            say(f"ready; {parts.leases.identity.id} trains {parts.leases.identity.base_model}")
        try:
            await until_asked_to_end(running)
        finally:
            log.info("finishing the pass in hand and writing snapshots")
            for parts in trainers:
                parts.worker.stop()
            jobs.stop()
            await celery.stop()
            await jobs.finished()
            await _ended(running)
            for parts in trainers:
                await asyncio.to_thread(parts.close)
            if group is not None:
                await asyncio.to_thread(group.close)


async def _ended(running: "list[asyncio.Task[None]]") -> None:
    """Wait until all trainers have ended, and raise their error. After a ``ProcessMustEnd`` the others have a short time."""
    has_failed = any(task.done() and isinstance(task.exception(), ProcessMustEnd) for task in running)
    await asyncio.wait(running, timeout=_LAST_SECONDS if has_failed else None)
    for task in running:
        if task.done():
            await task


def _part(base_model: str) -> str:
    return f"trainer of {base_model}"


async def _trainer(
    runtime: Runtime, facts: BaseModelFacts, group: TrainerGroup | None, loaded: dict[str, BaseModel]
) -> TrainingParts:
    """Load a base model, which is then in ``loaded`` too, and compose its trainer."""
    loaded[facts.name] = base = await asyncio.to_thread(load_base, facts, runtime.settings, group)
    return wire_trainer(runtime, base, group)


def _celery_worker(
    cluster: ClusterRuntime, base_models: list[str], jobs: JobRunner, may_declare_dead: Callable[[], bool]
) -> CeleryWorker:
    runtime = cluster.runtime
    housekeeping = Housekeeping(runtime, may_declare_dead)
    announcer = PlacementAnnouncer(cluster.celery, runtime)

    async def place(base_model: str) -> None:
        runtime.wakeups.announce(placements_topic(base_model))

    handlers: dict[str, Handler] = {
        PLACE: place,
        ANNOUNCE: announcer.announce,
        JOBS: JobLooks(cluster.celery, lambda: jobs.is_busy, jobs.run_all).look,
        **{step_task(step): partial(housekeeping.run_if_due, step) for step in StepName},
    }
    queues = [HOUSEKEEPING, *(training_queue(base_model) for base_model in base_models)]
    name = f"weft-{uuid4().hex[:8]}@{socket.gethostname()}"
    # Any time, with all the jobs that it finds: each is watched by its lease, and one that stands still is ended.
    return CeleryWorker(cluster.celery, queues, handlers, name=name, seconds={JOBS: None})
