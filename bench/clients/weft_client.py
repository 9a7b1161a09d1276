"""HTTP client of weft for benchmarks, in one event loop. It does little work for each request, since it shares the machine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from bench.workload import RANK, OperationShape, token_block

_LESSON = OperationShape(1, 64)
_LEARNING_RATE = 5e-3
"""Learning rate so large that one step changes the adapter's answers."""
_POLL_AGAIN = 408


class WeftClient:
    """One key's requests. Use as an async context manager. Raises ``RuntimeError`` for an answer that is no success."""

    def __init__(self, base_url: str, key: str) -> None:
        self._url = f"{base_url}/api/v1"
        self._headers = {"X-API-Key": key, "Content-Type": "application/json"}
        self._http: aiohttp.ClientSession | None = None

    async def post(self, endpoint: str, /, **body: Any) -> dict[str, Any]:
        """POST JSON."""
        return await self._ask("POST", endpoint, body)

    async def get(self, endpoint: str) -> dict[str, Any]:
        """GET JSON."""
        return await self._ask("GET", endpoint, None)

    async def result(self, promise: dict[str, Any]) -> dict[str, Any]:
        """Wait for the outcome of a promise and return it."""
        while True:
            found = await self._ask("POST", "retrieve_future", {"request_id": promise["request_id"]})
            if "error" in found:
                raise RuntimeError(f"the operation failed: {found['error']}")
            if found.get("type") != "try_again":
                return found

    @asynccontextmanager
    async def stream(self, endpoint: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST ``body`` and yield the response while it arrives."""
        async with self._open().post(f"{self._url}/{endpoint}", data=orjson.dumps(body)) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{endpoint} answered {answer.status}: {(await answer.text())[:500]}")
            yield answer

    async def _ask(self, method: str, endpoint: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else orjson.dumps(body)
        async with self._open().request(method, f"{self._url}/{endpoint}", data=data) as answer:
            content = await answer.read()
            if answer.status not in (200, _POLL_AGAIN):
                raise RuntimeError(f"{endpoint} answered {answer.status}: {content[:500].decode()}")
        found: dict[str, Any] = orjson.loads(content)
        return found

    def _open(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("the client was not opened")
        return self._http

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_read=120),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open().close()


async def _open_session(base_url: str, key: str) -> str:
    async with WeftClient(base_url, key) as client:
        session: str = (await client.post("create_session", sdk_version="bench"))["session_id"]
        return session


def open_session(base_url: str, key: str) -> str:
    """Open a session and return its id. For a caller without an event loop."""
    return asyncio.run(_open_session(base_url, key))


@dataclass(slots=True)
class LearningRun:
    """A run that takes a step on random tokens before each checkpoint, so that no two checkpoints sample the same tokens."""

    client: WeftClient
    session: str
    run: str
    vocabulary: int
    paths: list[str] = field(default_factory=list)
    samplers: int = 0
    _seq_id: int = 0

    @classmethod
    async def create(cls, client: WeftClient, *, base_model: str, vocabulary: int, seed: int = 0) -> Self:
        """Return a new run on the base, in a session of its own."""
        session = (await client.post("create_session", sdk_version="bench"))["session_id"]
        lora = {"rank": RANK, "seed": seed, "train_unembed": False}
        promise = await client.post(
            "create_model", session_id=session, model_seq_id=0, base_model=base_model, lora_config=lora
        )
        return cls(client, session, (await client.result(promise))["model_id"], vocabulary)

    async def save(self, checkpoints: int) -> None:
        """Add ``checkpoints`` new checkpoints to ``paths``, with a training step before each."""
        promises = [await self._step_and_save(len(self.paths) + number) for number in range(checkpoints)]
        self.paths += [(await self.client.result(promise))["path"] for promise in promises]

    async def live_sampler(self) -> str:
        """Return a sampler that follows the run. It begins with the weights of the last checkpoint."""
        promise = await self.submit("save_weights_for_sampler", sampling_session_seq_id=self._next(), kind="inflight")
        sampler: str = (await self.client.result(promise))["sampling_session_id"]
        return sampler

    async def pinned_sampler(self, path: str) -> str:
        """Return a sampler of one checkpoint."""
        made = await self.client.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=self._next(),
            model_path=path,
        )
        sampler: str = made["sampling_session_id"]
        return sampler

    async def step(self) -> None:
        """Train on one sequence, and wait for the results."""
        promises = await self._step(self._seq_id)
        for promise in promises:
            await self.client.result(promise)

    async def _step_and_save(self, number: int) -> dict[str, Any]:
        await self._step(number)
        return await self.submit("save_weights_for_sampler", path=f"v{number}")

    async def _step(self, number: int) -> list[dict[str, Any]]:
        (row,) = token_block(_LESSON, vocabulary=self.vocabulary, seed=number).tolist()
        datum = {
            "model_input": {"chunks": [{"tokens": row[:-1]}]},
            "loss_fn_inputs": {
                "target_tokens": _tensor(row[1:], "int64"),
                "weights": _tensor([1.0] * _LESSON.length, "float32"),
            },
        }
        lesson = {"data": [datum], "loss_fn": "cross_entropy"}
        return [
            await self.submit("forward_backward", forward_backward_input=lesson),
            await self.submit("optim_step", adam_params={"learning_rate": _LEARNING_RATE}),
        ]

    async def submit(self, endpoint: str, **body: Any) -> dict[str, Any]:
        """POST the run's next training request and return its promise."""
        self._seq_id += 1
        return await self.client.post(endpoint, model_id=self.run, seq_id=self._seq_id, **body)

    def _next(self) -> int:
        self.samplers += 1
        return self.samplers - 1


def _tensor(data: Sequence[float], dtype: str) -> dict[str, Any]:
    return {"data": data, "dtype": dtype, "shape": [len(data)]}


def sample_body(sampler: str, seq_id: int, prompt: Sequence[int], *, max_tokens: int, seed: int) -> dict[str, Any]:
    """Return the JSON of a sample of exactly ``max_tokens`` tokens at temperature 1."""
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": list(prompt)}]},
        "sampling_params": {"max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "stop": []},
    }
