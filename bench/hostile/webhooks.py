"""Attack by webhooks: as many as a tenant may have, to receivers that never answer or do so late, and ever new events.

The service is told that webhooks may reach this machine (``WEFT_WEBHOOK_NETWORKS``), which they may not by default.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count

import orjson

from bench.hostile.foothold import OWN_PREFIX, Foothold, again_and_again

NETWORKS = '["127.0.0.0/8"]'
"""Value of ``WEFT_WEBHOOK_NETWORKS`` that the attack needs."""
_CONNECTIONS = 16
_WEBHOOKS = 10
"""A tenant's limit by default."""
_LATE_SECONDS = 5.0
_CLEANING_SECONDS = 3.0


async def slow_webhooks(foothold: Foothold) -> None:
    """Have test events sent to every webhook, while half of the receivers hang and the others are late."""
    paths = [f"{OWN_PREFIX}/webhooks/hostile-{number}" for number in range(_WEBHOOKS)]

    async def send(number: int) -> None:
        await foothold.send("POST", f"{paths[number % _WEBHOOKS]}/test", b"")

    async with _receivers() as url:
        try:
            for path in paths:
                await foothold.send("PUT", path, orjson.dumps({"url": url, "events": ["*"]}))
            await again_and_again(_CONNECTIONS, send)
        finally:
            # What waits for them would be sent during the next attack.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLEANING_SECONDS):
                    await asyncio.gather(*(foothold.send("DELETE", path) for path in paths))


@asynccontextmanager
async def _receivers() -> AsyncIterator[str]:
    """Serve at a port of this machine: every other connection gets no answer, the others get theirs late."""
    numbers, is_over = count(), asyncio.Event()

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), None if next(numbers) % 2 else _LATE_SECONDS)
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        is_over.set()
        server.close()
