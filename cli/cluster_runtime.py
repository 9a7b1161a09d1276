"""Opening of a cluster process's parts: PostgreSQL, Redis, Celery, and the links to the other processes."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from celery import Celery

from cli.data_folder_check import check_data_folder
from cli.metrics_endpoint import serve_metrics_and_health
from cli.readiness import readiness
from contracts.errors import InvalidRequest
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.runtime import Runtime
from migrations.upgrade import check_not_older
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.database_clock import clock_of
from store.settings import Settings
from telemetry.readiness import NotReady, Readiness
from telemetry.telemetry import open_telemetry
from tenants.request_rates import RequestRates
from workers.cluster.celery_app import make_celery
from workers.cluster.publication import ClusterPublication
from workers.cluster.redis_channel import open_redis
from workers.cluster.redis_counts import RedisCounts
from workers.cluster.redis_feed import RedisTokenFeed
from workers.cluster.redis_wakeups import RedisWakeups

API, WORKER, POOL = "api", "worker", "pool"
"""Names of the processes in logs and metrics."""
_LOAD_PATIENCE = timedelta(seconds=60)
"""Time that a sampling process may take to load a version."""


@dataclass(frozen=True, slots=True)
class ClusterRuntime:
    """A runtime over PostgreSQL and Redis, and the Celery app of the cluster."""

    runtime: Runtime
    readiness: Readiness
    celery: Celery


def check_cluster(settings: Settings) -> None:
    """Raise ``InvalidRequest`` unless the settings are a cluster's."""
    if settings.database_url is None or not settings.database_url.startswith("postgresql"):
        raise InvalidRequest(
            "a cluster needs PostgreSQL: set WEFT_DATABASE_URL=postgresql+asyncpg://…; `weft serve` runs without"
        )
    if settings.redis_url is None:
        raise InvalidRequest("a cluster needs Redis: set WEFT_REDIS_URL=redis://…; `weft serve` runs without")


@asynccontextmanager
async def open_cluster(
    settings: Settings, process: str, bases: Collection[str], *, listens: bool = True
) -> AsyncIterator[ClusterRuntime]:
    """Open the process's connections and close them on leaving. ``process`` is its name in logs and metrics.

    ``listens``: it serves its metrics and health, as every process does that stays.

    Raises ``InvalidRequest`` for settings that are not a cluster's, for a schema that is too old, and for a data folder without
    its disk.
    """
    check_cluster(settings)
    url = settings.resolved_database_url()
    await asyncio.to_thread(check_not_older, url)
    database = Database(create_engine(url, pool_size=settings.database_pool))
    redis = open_redis(settings.redis_url or "")
    wakeups = RedisWakeups(redis, settings.redis_namespace)
    feed = RedisTokenFeed(redis, settings.redis_namespace)
    data_folder = DataFolder(settings.data_dir)
    await check_data_folder(database, data_folder)
    clock = await clock_of(database)
    publication = ClusterPublication(database, wakeups, clock, patience=_LOAD_PATIENCE)
    telemetry, ready = open_telemetry(settings, process, clock), readiness(database, bases)
    counts = RedisCounts(settings.redis_url or "", settings.redis_namespace)
    request_rates = RequestRates(counts.storage)
    runtime = Runtime(
        settings=settings,
        database=database,
        ledger=Ledger(database, wakeups, clock, telemetry, PayloadFiles(data_folder)),
        wakeups=wakeups,
        feed=feed,
        publication=publication,
        data_folder=data_folder,
        clock=clock,
        telemetry=telemetry,
        request_rates=request_rates,
    )
    # Not needed: all processes lose Redis at once and go on without, so no other process could take over.
    ready.add("redis", partial(_redis_answers, wakeups), is_needed=False)
    if process == API:
        ready.add("requests", partial(_requests_are_shared, request_rates), is_needed=False)
    tasks = [
        asyncio.create_task(wakeups.run(), name="wakeups"),
        asyncio.create_task(feed.run(), name="tokens"),
        asyncio.create_task(clock.run(database), name="clock"),
    ]
    try:
        async with AsyncExitStack() as stack:
            if listens:
                serving = serve_metrics_and_health(telemetry, settings, database, ready, reads_queue=process == API)
                await stack.enter_async_context(serving)
            yield ClusterRuntime(runtime, ready, make_celery(settings))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await counts.close()
        await redis.aclose()
        await database.close()


async def _redis_answers(wakeups: RedisWakeups) -> None:
    if not wakeups.is_through:
        raise NotReady("Redis does not answer; the database is looked at instead, which is slower")


async def _requests_are_shared(rates: RequestRates) -> None:
    await rates.look()
    if rates.counts_alone:
        raise NotReady("Redis does not answer; each API process counts requests a minute by itself")
