"""Surroundings of operators' commands that change what a running service does: a ledger, and wake-ups for the service."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import typer

from cli.administration import on_database
from cli.options import load_settings, run_or_explain
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.wakeups import Wakeups
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database
from store.settings import Settings
from telemetry.telemetry import Telemetry

T = TypeVar("T")


class NotedWakeups(Wakeups):
    """Wake-ups that are kept until the command tells the service of them."""

    def __init__(self) -> None:
        super().__init__()
        self.announced: dict[str, None] = {}

    def announce(self, topic: str) -> None:
        """Note the topic."""
        self.announced[topic] = None


@dataclass(frozen=True, slots=True)
class Operator:
    """Parts that an operator's command works with."""

    database: Database
    ledger: Ledger
    wakeups: NotedWakeups


def as_operator(data: Any, work: Callable[[Operator], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` on the service's database, then wake the service's processes, and return what ``work`` returns.

    A cluster is told over Redis. ``weft serve`` listens to no other process: it follows at its next look, within seconds.
    Exits with 1 and the text of a ``WeftError``.
    """
    settings = load_settings(data=data)

    async def worked(database: Database) -> T:
        wakeups = NotedWakeups()
        payloads = PayloadFiles(DataFolder(settings.data_dir))
        ledger = Ledger(database, wakeups, utc_now, Telemetry.of("cli", utc_now), payloads)
        found = await work(Operator(database, ledger, wakeups))
        await _tell(settings, list(wakeups.announced))
        return found

    found: T = run_or_explain(lambda: on_database(settings, worked))
    return found


async def _tell(settings: Settings, topics: list[str]) -> None:
    if settings.redis_url is None or not topics:
        return
    from redis.exceptions import RedisError

    from workers.cluster.redis_channel import open_redis
    from workers.cluster.redis_wakeups import publish_once

    redis = open_redis(settings.redis_url)
    try:
        async with asyncio.timeout(5):
            await publish_once(redis, settings.redis_namespace, topics)
    except (RedisError, OSError, TimeoutError):
        typer.echo("weft: Redis does not answer; the service follows at its next look", err=True)
    finally:
        await redis.aclose()
