"""``weft up``: a whole cluster on one machine, under supervision."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cli.address import address, reserve_address
from cli.base_models import read_base_models
from cli.cluster_runtime import check_cluster
from cli.greeting import greet
from cli.supervisor import Child, Supervisor
from contracts.errors import Unavailable
from migrations.upgrade import upgrade
from store.database import Database, create_engine
from store.settings import Settings
from workers.leases.processes import declare_dead

log = logging.getLogger(__name__)

_COMPUTING_NICENESS = 5
"""Niceness of trainers and pools, which fill every core: an API on the same cores needs little time, but at once."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of processes: API processes in all, trainers and pools for each base model."""

    apis: int
    trainers: int
    pools: int


async def run_cluster(settings: Settings, sizes: Sizes) -> None:
    """Run everything until SIGINT or SIGTERM. Raises ``WeftError`` when it cannot start."""
    check_cluster(settings)
    bases = read_base_models(settings)
    # Kept open, so that the port stays reserved for the API processes, which share it.
    listener = reserve_address(settings.host, settings.port, setting="--port")
    await asyncio.to_thread(upgrade, settings.resolved_database_url())
    database = Database(create_engine(settings.resolved_database_url(), pool_size=2))
    try:

        async def declare(pid: int) -> None:
            try:
                async with database.write() as transaction:
                    await declare_dead(transaction, pid)
            except Unavailable as outage:
                # The process's lease ends by itself.
                log.warning("pid %d could not be declared dead: %s", pid, outage.message)

        port = listener.getsockname()[1]
        logs_json = settings.log_format == "json"
        supervisor = Supervisor(children(settings, sizes, list(bases), port), declare, logs_json=logs_json)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)
        running = asyncio.create_task(supervisor.run())
        ready = asyncio.create_task(supervisor.wait_ready())
        await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            try:
                await greet(database, address(listener))
            except Unavailable as outage:
                log.warning("%s is ready; it could not be greeted: %s", address(listener), outage.message)
        ready.cancel()
        await running
    finally:
        listener.close()
        await database.close()


def children(settings: Settings, sizes: Sizes, base_models: list[str], port: int) -> list[Child]:
    """Return the cluster's processes. Trainers divide the cores among them, unless ``OMP_NUM_THREADS`` is set."""
    trainers = sizes.trainers * len(base_models)
    share = str(max(1, (os.cpu_count() or 1) // max(1, trainers)))
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share)}
    specs = dict(zip(base_models, settings.base_models, strict=True))
    several = len(base_models) > 1

    def child(command: str, number: int, bases: list[str], environment: Mapping[str, str] | None = None) -> Child:
        argv = [sys.executable, "-m", "cli.main", command, "--data", str(settings.data_dir.absolute())]
        for base_model in bases:
            argv += ["--base-model", specs[base_model]]
        if command == "api":
            argv += ["--host", settings.host, "--port", str(port)]
        label = f"{command}.{number}" + (f" {bases[0]}" if several and command in ("worker", "pool") else "")
        niceness = 0 if command == "api" else _COMPUTING_NICENESS
        return Child(label, argv, environment or {}, niceness, gives_signs=True)

    found = [child("api", number, base_models) for number in range(sizes.apis)]
    for base_model in base_models:
        found += [child("worker", number, [base_model], threads) for number in range(sizes.trainers)]
        for number in range(sizes.pools):
            name = {"WEFT_POOL_NAME": f"{settings.pool_name or 'pool'}-{number}"}
            if sizes.trainers:
                name["WEFT_BESIDE_TRAINER"] = "true"
            found.append(child("pool", number, [base_model], {**threads, **name}))
    beat = [sys.executable, "-m", "cli.main", "beat", "--data", str(settings.data_dir.absolute())]
    return [*_with_metrics_ports(found, settings.metrics_port), Child("beat.0", beat)]


def _with_metrics_ports(found: list[Child], first_port: int | None) -> list[Child]:
    """Return the children, each with a metrics port of its own from ``first_port`` on."""
    if not first_port:
        return found
    return [
        replace(child, environment={**child.environment, "WEFT_METRICS_PORT": str(first_port + number)})
        for number, child in enumerate(found)
    ]
