"""Contestants of ``bench.sampling``: ask the same samples of weft, of a vLLM server, of the torch replica, and by the SDK."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import aiohttp
import msgspec
import numpy as np
import tinker
from tinker import types

from bench.clients.weft_client import LearningRun, WeftClient, sample_body
from contracts.base_model import BaseModelFacts
from engine.sampling.in_process.replica import TorchReplica
from engine.sampling.replica import AdapterVersion, GenerateRequest, NewToken
from engine.sampling.vllm.http import open_session
from engine.sampling.vllm.messages import Chunk, EventLines
from engine.sampling.vllm.request import VllmRequest
from engine.sampling.vllm.sequence import GENERATE
from testing.service_process import ServiceProcess

PROMPT_TOKENS = 16
_KEEPALIVE_SECONDS = 2.0
"""Shorter than vLLM's own, so that no request meets a connection that is just being closed."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One sample of ``tokens`` tokens from adapter number ``adapter``."""

    prompt: list[int]
    tokens: int
    adapter: int
    seed: int


def asks(number: int, *, lengths: Sequence[int], adapters: int, vocabulary: int, seed: int) -> list[Ask]:
    """Return ``number`` samples, each with a prompt of its own. Lengths and adapters come in turn."""
    prompts = np.random.default_rng(seed).integers(0, vocabulary, size=(number, PROMPT_TOKENS)).tolist()
    return [
        Ask(prompt, lengths[place % len(lengths)], place % adapters, seed * 100_000 + place)
        for place, prompt in enumerate(prompts)
    ]


@asynccontextmanager
async def serving(data: Path, facts: BaseModelFacts, environment: Mapping[str, str]) -> AsyncIterator[ServiceProcess]:
    """Run ``weft serve`` on the base."""
    service = ServiceProcess(data=data, base_models=[f"{facts.name}={facts.path}"], environment=environment)
    await asyncio.to_thread(service.start)
    try:
        yield service
    finally:
        await asyncio.to_thread(service.stop)


class Contestant(Protocol):
    """A way to ask for samples."""

    async def sample(self, ask: Ask) -> int:
        """Sample, and return the number of tokens that came."""


async def turn(contestant: Contestant, wanted: Sequence[Ask], concurrent: int) -> float:
    """Ask for all samples, ``concurrent`` at a time, and return tokens a second. Raises ``RuntimeError`` for missing tokens."""
    waiting = iter(wanted)

    async def work() -> int:
        made = 0
        for ask in waiting:
            made += await contestant.sample(ask)
        return made

    started = perf_counter()
    made = sum(await asyncio.gather(*(work() for _ in range(concurrent))))
    seconds = perf_counter() - started
    asked = sum(ask.tokens for ask in wanted)
    if made != asked:
        raise RuntimeError(f"{made} tokens came of {asked}")
    return asked / seconds


class ThroughWeft:
    """Contestant that calls ``asample`` and ``retrieve_future``, as JSON, on samplers pinned to the adapters."""

    def __init__(self, client: WeftClient, samplers: Sequence[str]) -> None:
        self._client = client
        self._samplers = samplers
        self._seq_ids = count()

    async def sample(self, ask: Ask) -> int:
        """See ``Contestant``."""
        promise = await self.submit(ask)
        result = await self._client.result(promise)
        return len(result["sequences"][0]["tokens"])

    async def submit(self, ask: Ask) -> dict[str, Any]:
        """Submit a sample and return its promise."""
        body = sample_body(
            self._samplers[ask.adapter], next(self._seq_ids), ask.prompt, max_tokens=ask.tokens, seed=ask.seed
        )
        return await self._client.post("asample", **body)

    async def version(self, adapter: int, vocabulary: int) -> str:
        """Return the adapter's version name on replicas."""
        promise = await self.submit(Ask([vocabulary - 1], 1, adapter, 0))
        await self._client.result(promise)
        report = await self._client.get(f"samples/{promise['request_id']}")
        version: str = report["sequences"][0]["spans"][0]["version"]
        return version


def _engine_request(ask: Ask, number: int, adapter: AdapterVersion) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"straight-{number}",
        prompt=np.array(ask.prompt, np.int64),
        seeds=(ask.seed,),
        max_tokens=ask.tokens,
        adapter=adapter,
        cache_salt="bench",
    )


class StraightToVllm:
    """Contestant that sends the requests that weft sends, by a client that keeps its connections.

    ``is_streamed``: the tokens come one by one, as weft must read them to be able to cut a sample. Otherwise one answer
    comes at the end.
    """

    def __init__(
        self, http: aiohttp.ClientSession, url: str, versions: Sequence[str], *, vocabulary: int, is_streamed: bool
    ) -> None:
        self._http = http
        self._url = url + GENERATE
        self._versions = [AdapterVersion(version, Path()) for version in versions]
        self._vocabulary = vocabulary
        self._is_streamed = is_streamed
        self._numbers = count()

    async def sample(self, ask: Ask) -> int:
        """See ``Contestant``."""
        version = self._versions[ask.adapter]
        request = VllmRequest(_engine_request(ask, next(self._numbers), version), lambda: None)
        body = request.sequence_body(0, version.name, self._vocabulary) | {"stream": self._is_streamed}
        data = json.dumps(body).encode()
        async with self._http.post(self._url, data=data, headers={"Content-Type": "application/json"}) as answer:
            if answer.status != 200:
                raise RuntimeError(f"vLLM answered {answer.status}: {(await answer.text())[:500]}")
            if self._is_streamed:
                return await self._read(answer)
            return _made(msgspec.json.decode(await answer.read(), type=Chunk))

    async def _read(self, answer: aiohttp.ClientResponse) -> int:
        made, lines = 0, EventLines()
        async for data in answer.content.iter_any():
            for payload in lines.feed(data):
                if payload != b"[DONE]":
                    made += _made(msgspec.json.decode(payload, type=Chunk))
        return made


def _made(chunk: Chunk) -> int:
    if chunk.error is not None:
        raise RuntimeError(f"vLLM failed: {chunk.error.message}")
    return sum(len(choice.token_ids or []) for choice in chunk.choices)


def keeping_session(base_url: str) -> aiohttp.ClientSession:
    """Return the HTTP session of a ``StraightToVllm``."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    return open_session(base_url, 0, _KEEPALIVE_SECONDS, timeout=timeout)


class StraightToTorch:
    """Contestant that runs the replica of ``weft serve`` without vLLM, in this process."""

    def __init__(self, replica: TorchReplica, directories: Sequence[Path]) -> None:
        self._replica = replica
        self._versions = [AdapterVersion(directory.name, directory) for directory in directories]
        self._numbers = count()

    async def sample(self, ask: Ask) -> int:
        """See ``Contestant``."""
        request = _engine_request(ask, next(self._numbers), self._versions[ask.adapter])
        return sum([isinstance(e, NewToken) async for events in self._replica.generate(request) for e in events])


class ThroughSdk:
    """Contestant that uses the real SDK, on threads of its own in this process."""

    def __init__(self, base_url: str, key: str, paths: Sequence[str]) -> None:
        self._service = tinker.ServiceClient(base_url=base_url, api_key=key)
        self._samplers = [self._service.create_sampling_client(model_path=path).result() for path in paths]

    async def sample(self, ask: Ask) -> int:
        """See ``Contestant``."""
        params = types.SamplingParams(max_tokens=ask.tokens, seed=ask.seed, stop=[])
        prompt = types.ModelInput.from_ints(ask.prompt)
        sampled = await self._samplers[ask.adapter].sample(prompt, 1, params)
        return len(sampled.sequences[0].tokens)

    def close(self) -> None:
        """End the session."""
        self._service.close("success").result()


@dataclass(frozen=True, slots=True)
class Adapters:
    """Checkpoints of a run: as weft's paths, as samplers pinned to them, and as replicas know them."""

    paths: list[str]
    weft: ThroughWeft
    versions: list[str]

    @classmethod
    async def make(cls, client: WeftClient, *, base_model: str, vocabulary: int, number: int) -> "Adapters":
        """Train ``number`` checkpoints, open a sampler of each, and draw one sample from each."""
        run = await LearningRun.create(client, base_model=base_model, vocabulary=vocabulary)
        await run.save(number)
        weft = ThroughWeft(client, [await run.pinned_sampler(path) for path in run.paths])
        versions = [await weft.version(adapter, vocabulary) for adapter in range(number)]
        return cls(run.paths, weft, versions)
