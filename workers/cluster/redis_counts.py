"""Counts of requests in Redis, which all API processes share. Nothing that must be exact is counted there."""

from limits.aio.storage import RedisStorage
from redis.asyncio import BlockingConnectionPool

from tenants.request_rates import PATIENCE_SECONDS

_CONNECTIONS = 8


class RedisCounts:
    """Storage of counts, on a few connections of its own: a flood waits for one, and other uses of Redis do not."""

    def __init__(self, url: str, namespace: str) -> None:
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=PATIENCE_SECONDS,
            socket_timeout=PATIENCE_SECONDS,
            socket_connect_timeout=PATIENCE_SECONDS,
        )
        self.storage = RedisStorage(
            "async+redis://",
            wrap_exceptions=True,
            implementation="redispy",
            key_prefix=f"{namespace}:requests",
            connection_pool=self._pool,  # type: ignore[arg-type] # an option of redis-py
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.aclose()
