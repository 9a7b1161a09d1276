"""The attacker's requests: counted by the status of their answers, which are otherwise not looked at."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import zstandard

PREFIX = "/api/v1"
OWN_PREFIX = "/api/weft/v1"
"""Prefix of the routes that weft adds to Tinker's."""
FAILED = 0
"""Status under which failed connections are counted."""
_PAUSE_SECONDS = 0.02
"""Pause after a connection that failed: whoever is cut off at once would else only spin."""


@dataclass(slots=True)
class Foothold:
    """One attack's session of the attacker, and its connections."""

    base_url: str
    key: str
    base_model: str
    http: aiohttp.ClientSession
    answers: Counter[int] = field(default_factory=Counter)
    session: str = ""
    further_sessions: list[str] = field(default_factory=list)
    numbers: "count[int]" = field(default_factory=count)

    async def open(self) -> None:
        """Open the session. Raises ``RuntimeError`` when the service refuses."""
        self.session = (await self.asked("create_session", {"sdk_version": "hostile"}))["session_id"]

    async def close(self) -> None:
        """End the sessions, which ends their samples and their runs."""
        await asyncio.gather(
            *(self.post(f"sessions/{one}/finish", {}) for one in (self.session, *self.further_sessions))
        )

    async def run(self, rank: int = 8) -> str:
        """Return a new run of the session, once it is made."""
        lora = {"rank": rank, "seed": 0, "train_unembed": False}
        body = {"session_id": self.session, "model_seq_id": next(self.numbers), "base_model": self.base_model}
        promise = await self.asked("create_model", {**body, "lora_config": lora})
        await self.result(promise["request_id"])
        return str(promise["model_id"])

    async def sampler(self, path: str | None = None) -> str:
        """Return a new sampler of the bare base, or of a checkpoint."""
        source = {"base_model": self.base_model} if path is None else {"model_path": path}
        body = {"session_id": self.session, "sampling_session_seq_id": next(self.numbers), **source}
        return str((await self.asked("create_sampling_session", body))["sampling_session_id"])

    async def checkpoint(self, run: str, seq_id: int = 1) -> str:
        """Return the path of a new sampler checkpoint of the run."""
        body = {"model_id": run, "seq_id": seq_id, "path": f"v{seq_id}"}
        saved = await self.result((await self.asked("save_weights_for_sampler", body))["request_id"])
        return str(saved["path"])

    async def result(self, request_id: str) -> dict[str, Any]:
        """Wait for an operation's result and return it."""
        while True:
            status, content = await self.send(
                "POST", f"{PREFIX}/retrieve_future", orjson.dumps({"request_id": request_id})
            )
            if status == 200:
                found: dict[str, Any] = orjson.loads(content)
                return found
            if status != 408:
                raise RuntimeError(f"retrieve_future answered {status}: {content[:300]!r}")

    async def asked(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST ``body`` and return the answer. Raises ``RuntimeError`` for one that is no success."""
        status, content = await self.post(endpoint, body)
        if status != 200:
            raise RuntimeError(f"{endpoint} answered {status}: {content[:300]!r}")
        found: dict[str, Any] = orjson.loads(content)
        return found

    async def post(self, endpoint: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """POST ``body`` as JSON to one of Tinker's endpoints; return status and content."""
        return await self.send("POST", f"{PREFIX}/{endpoint}", orjson.dumps(body))

    async def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send a request and return its answer's status and content; ``FAILED`` for a connection that broke."""
        sent = {"X-API-Key": self.key, "Content-Type": "application/json", **(headers or {})}
        try:
            async with self.http.request(method, self.base_url + path, data=body, headers=sent) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.answers[FAILED] += 1
            await asyncio.sleep(_PAUSE_SECONDS)
            return FAILED, b""
        self.answers[answer.status] += 1
        return answer.status, content

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a bare connection to the service. Raises ``OSError``."""
        address = urlsplit(self.base_url)
        return await asyncio.open_connection(address.hostname, address.port)

    def head(self, method: str, path: str, *lines: str, with_key: bool = True) -> bytes:
        """Return the beginning of a request as bytes, without the empty line that ends it."""
        key = [f"X-API-Key: {self.key}"] if with_key else []
        return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: weft", *key, *lines, ""]).encode()


async def again_and_again(connections: int, act: Callable[[int], Awaitable[object]]) -> None:
    """Call ``act`` with 0, 1, 2 and so on, ``connections`` at a time, until cancelled."""
    numbers = count()

    async def one_after_another() -> None:
        while True:
            with suppress(OSError):
                await act(next(numbers))
                continue
            await asyncio.sleep(_PAUSE_SECONDS)

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(one_after_another())


def packed(body: bytes) -> bytes:
    """Return ``body`` as zstd: a few bytes for millions."""
    return zstandard.ZstdCompressor(level=1).compress(body)
