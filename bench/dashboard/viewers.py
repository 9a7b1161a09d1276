"""Viewers of run pages without a browser: streams of a run's events, whose ids are its optimizer steps."""

import asyncio
from dataclasses import dataclass, field
from time import monotonic

import aiohttp
import orjson

_OPEN_SECONDS = 60.0


@dataclass(slots=True)
class Viewer:
    """One open stream. ``steps``: steps in the order in which they came; ``came``: when, by the system's monotonic clock."""

    run: str
    after: int
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    steps: list[int] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def wrong(self) -> int:
        """Number of steps that are missing or came twice."""
        wanted = range(self.after + 1, self.after + 1 + len(self.steps))
        return sum(step != right for step, right in zip(self.steps, wanted, strict=True))

    async def until(self, step: int) -> None:
        """Wait until as many points have come as there are up to ``step``."""
        while self.after + len(self.steps) < step:
            self._news.clear()
            await self._news.wait()

    async def watch(self, client: aiohttp.ClientSession, base_url: str, cookie: str) -> None:
        """Read the stream until cancelled."""
        url = f"{base_url}/ui/runs/{self.run}/events?after={self.after}"
        async with client.get(url, headers={"Cookie": cookie, "Accept": "text/event-stream"}) as answer:
            answer.raise_for_status()
            self.is_open.set()
            name = b""
            async for line in answer.content:
                if line.startswith(b"event: "):
                    name = line[7:].strip()
                elif line.startswith(b"data: ") and name == b"points":
                    new = [point["step"] for point in orjson.loads(line[6:])]
                    self.steps += new
                    self.came += [monotonic()] * len(new)
                    self._news.set()


class Viewers:
    """Many viewers, dealt over runs and browser sessions. Use as an async context manager; leaving it closes the streams."""

    def __init__(self, base_url: str, cookies: list[str], viewers: list[Viewer]) -> None:
        self.viewers = viewers
        self._base_url = base_url
        self._cookies = cookies
        self._tasks: list[asyncio.Task[None]] = []
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Viewers":
        timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
        # Lines of a first event may be long.
        self._client = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**22
        )
        for number, viewer in enumerate(self.viewers):
            cookie = self._cookies[number % len(self._cookies)]
            self._tasks.append(asyncio.create_task(viewer.watch(self._client, self._base_url, cookie)))
        async with asyncio.timeout(_OPEN_SECONDS):
            for viewer, task in zip(self.viewers, self._tasks, strict=True):
                opened = asyncio.create_task(viewer.is_open.wait())
                await asyncio.wait([opened, task], return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    await task
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
