"""Makes the swaps of ``bench.swap`` at a vLLM server directly, with the least work of any controller.

The client loads the new version, aborts the old version's streams, and asks for the rest of each stream under the new name, at
the same pace of prompts as weft. The time is vLLM's own for a swap: no gate, ledger, tenant or database has a part.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter

import aiohttp
import msgspec
import orjson

from bench.sampling.contestants import keeping_session
from bench.swap.tenant import Round, Swap
from engine.sampling.vllm.aborts import ABORT
from engine.sampling.vllm.adapters import LOAD, UNLOAD
from engine.sampling.vllm.http import request_url
from engine.sampling.vllm.messages import Chunk, EventLines
from engine.sampling.vllm.prompt_budget import PromptBudget, Reservation
from engine.sampling.vllm.sequence import GENERATE

_ID_PREFIX = "generate-tokens-"
_JSON = {"Content-Type": "application/json"}
_PROMPT_TOKENS = 8
_SWAP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class BareLoad:
    """Size of the load.

    - ``streams`` of each of two adapters, of samples of ``tokens`` tokens each.
    - ``prompt_tokens``: most prompt tokens at a time; None: any number.
    - ``rounds`` of ``swaps`` swaps each. A round begins with ``quiet_seconds`` without swaps.
    """

    vocabulary: int
    streams: int
    tokens: int
    prompt_tokens: int | None
    swaps: int
    rounds: int
    quiet_seconds: float


class _Server:
    """Requests to the server, on connections that are kept. Raises ``RuntimeError`` for an answer that is no success."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, load: BareLoad) -> None:
        self.load = load
        self.prompts = PromptBudget(load.prompt_tokens)
        self.numbers = count()
        self._http = http
        self._base_url = base_url

    async def post(self, path: str, body: dict[str, object]) -> None:
        """POST a request with a short answer."""
        async with self._http.post(self._base_url + path, data=orjson.dumps(body), headers=_JSON) as answer:
            await _expect_success(answer)
            await answer.read()

    def generate(self, body: dict[str, object]) -> "aiohttp.client._RequestContextManager":
        """POST a request for a sample, whose answer can be read while it arrives."""
        return self._http.post(self._base_url + GENERATE, data=orjson.dumps(body), headers=_JSON)


async def _expect_success(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise RuntimeError(f"{answer.url.path} answered {answer.status}: {(await answer.text())[:500]}")


@dataclass(slots=True, eq=False)
class _Stream:
    """Draws one sample after another from ``version``, and continues an aborted sample. ``gaps`` are as in ``TokenStream``."""

    server: _Server
    number: int
    version: str
    changed: asyncio.Event
    gaps: list[tuple[float, float]] = field(default_factory=list)
    request_id: str = ""
    shown: str = ""
    shown_at: float = 0.0
    is_stopping: bool = False
    last: float | None = None

    async def run(self) -> None:
        """Stream samples until ``is_stopping``, and the sample in hand to its end."""
        load, number = self.server.load, 0
        while not self.is_stopping:
            tokens = [(self.number * 7 + number * 31 + place * 13) % load.vocabulary for place in range(_PROMPT_TOKENS)]
            self.last = None
            while (left := _PROMPT_TOKENS + load.tokens - len(tokens)) > 0:
                reservation = await self.server.prompts.reserve(len(tokens))
                try:
                    tokens += await self._segment(tokens, left, reservation)
                finally:
                    reservation.release()
            number += 1

    async def _segment(self, prompt: list[int], tokens: int, reservation: Reservation) -> list[int]:
        version, made, lines = self.version, list[int](), EventLines()
        self.request_id = f"bare-{next(self.server.numbers)}"
        params = {
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": self.number,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 0,
        }
        body = {"request_id": self.request_id, "model": version, "token_ids": prompt, "stream": True}
        async with self.server.generate({**body, "sampling_params": params}) as answer:
            await _expect_success(answer)
            async for data in answer.content.iter_any():
                for payload in lines.feed(data):
                    if payload != b"[DONE]":
                        made += self._take(msgspec.json.decode(payload, type=Chunk), version)
                        reservation.release()
        return made

    def _take(self, chunk: Chunk, version: str) -> list[int]:
        if chunk.error is not None:
            raise RuntimeError(f"vLLM failed: {chunk.error.message}")
        tokens = [token for choice in chunk.choices for token in choice.token_ids or []]
        if tokens:
            now = perf_counter()
            if self.last is not None:
                self.gaps.append((self.last, now))
            self.last = now
            if self.shown != version:
                self.shown, self.shown_at = version, now
                self.changed.set()
        return tokens


class BareTenants:
    """Streams of two adapters. The first adapter is swapped to the folders in turn, the second adapter stays."""

    def __init__(self, server: _Server, folders: Sequence[Path], neighbour: Path) -> None:
        self._server = server
        self._folders = folders
        self._neighbour = neighbour
        self._changed = asyncio.Event()
        self._swapped: list[_Stream] = []
        self.streams: list[_Stream] = []
        """Streams of the second adapter, the neighbour."""

    async def run(self) -> list[Round]:
        """Run and return every round."""
        load, server = self._server.load, self._server
        await self._load("neighbour", self._neighbour)
        await self._load("bare-0", self._folders[0])
        for number in range(load.streams):
            self._swapped.append(_Stream(server, number, "bare-0", self._changed))
            self.streams.append(_Stream(server, load.streams + number, "neighbour", asyncio.Event()))
        everyone = [*self._swapped, *self.streams]
        async with asyncio.TaskGroup() as tasks:
            for stream in everyone:
                tasks.create_task(stream.run())
            rounds = await self._rounds()
            for stream in everyone:
                stream.is_stopping = True
        return rounds

    async def _rounds(self) -> list[Round]:
        load, rounds = self._server.load, []
        await asyncio.sleep(load.quiet_seconds)
        number = 0
        for turn in range(load.rounds):
            found = Round()
            await found.be_quiet(load.quiet_seconds)
            for _ in range(load.swaps * (turn + 1) // load.rounds - load.swaps * turn // load.rounds):
                number += 1
                found.swaps.append(await self._swap(number))
            rounds.append(found)
        return rounds

    async def _swap(self, number: int) -> Swap:
        version, asked = f"bare-{number}", perf_counter()
        await self._load(version, self._folders[number % len(self._folders)])
        answered = perf_counter()
        for stream in self._swapped:
            stream.version = version
        await self._server.post(ABORT, {"request_ids": [_ID_PREFIX + stream.request_id for stream in self._swapped]})
        async with asyncio.timeout(_SWAP_SECONDS):
            while any(stream.shown != version for stream in self._swapped):
                self._changed.clear()
                await self._changed.wait()
        swap = Swap(asked, answered, min(stream.shown_at for stream in self._swapped), perf_counter())
        await self._server.post(UNLOAD, {"lora_name": f"bare-{number - 1}"})
        return swap

    async def _load(self, name: str, folder: Path) -> None:
        await self._server.post(LOAD, {"lora_name": name, "lora_path": str(folder)})


async def bare_rounds(
    base_url: str, folders: Sequence[Path], neighbour: Path, load: BareLoad
) -> tuple[BareTenants, list[Round]]:
    """Run the load. Return the tenants, whose ``streams`` are the neighbour's, and the rounds."""
    async with keeping_session(base_url) as http:
        tenants = BareTenants(_Server(http, request_url(base_url), load), folders, neighbour)
        return tenants, await tenants.run()
