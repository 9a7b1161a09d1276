"""Wake-ups of a command on the database: kept until the command has ended, then told to a cluster over Redis."""

import asyncio

import typer

from ledger.wakeups import Wakeups
from store.settings import Settings


class NotedWakeups(Wakeups):
    """Wake-ups that are kept until the command tells the service of them."""

    def __init__(self) -> None:
        super().__init__()
        self.announced: dict[str, None] = {}

    def announce(self, topic: str) -> None:
        """Note the topic."""
        self.announced[topic] = None


async def tell(settings: Settings, topics: list[str]) -> None:
    """Wake a cluster's processes over Redis, if the settings name one."""
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
