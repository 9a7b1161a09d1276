"""A benchmark tenant with a live sampler, streams of samples from it, and checkpoints to swap to."""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Self

from bench.clients.weft_client import LearningRun, WeftClient
from bench.swap.token_streams import Sample, TokenStream

_SWAP_SECONDS = 60.0
_LAST_SAMPLES_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Swap:
    """Times of one swap, in seconds of ``perf_counter``.

    - ``asked``, ``answered``: the request and its answer.
    - ``first``: first token on the new weights.
    - ``all_shown``: time at which every stream has a token on the new weights.
    """

    asked: float
    answered: float
    first: float
    all_shown: float


@dataclass(slots=True)
class Round:
    """A round of the benchmark: a quiet time without swaps, (begin, end), then swaps."""

    quiet: tuple[float, float] = (0.0, 0.0)
    swaps: list[Swap] = field(default_factory=list)

    async def be_quiet(self, seconds: float) -> None:
        """Let the streams run for ``seconds`` without a swap."""
        begin = perf_counter()
        await asyncio.sleep(seconds)
        self.quiet = (begin, perf_counter())


class SwapTenant:
    """Tenant whose adapter is swapped while its samples stream. Use as an async context manager.

    Call ``learn``, ``start``, any number of ``swap``, then ``finish``. ``names[0]`` is the version at the start;
    ``names[k + 1]`` was asked for at ``asked[k]``.
    """

    def __init__(self, base_url: str, key: str, *, number: int, vocabulary: int) -> None:
        self._client = WeftClient(base_url, key)
        self._number = number
        self._vocabulary = vocabulary
        self._run: LearningRun | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._first_seen: dict[str, float] = {}
        self.names: list[str] = []
        self.asked: list[float] = []
        self.streams: list[TokenStream] = []

    @property
    def samples(self) -> list[Sample]:
        """Samples of all streams."""
        return [sample for stream in self.streams for sample in stream.samples]

    @property
    def run(self) -> LearningRun:
        """The run that ``learn`` made. Raises ``RuntimeError`` before that."""
        if self._run is None:
            raise RuntimeError("the tenant has no run yet")
        return self._run

    async def learn(self, base_model: str, versions: int) -> None:
        """Make a run with ``versions`` checkpoints."""
        self._run = await LearningRun.create(
            self._client, base_model=base_model, vocabulary=self._vocabulary, seed=self._number
        )
        await self._run.save(versions)

    async def start(self, streams: int, *, tokens: int) -> None:
        """Begin ``streams`` streams of samples of ``tokens`` tokens each. Return once every stream has a token."""
        sampler = await self.run.live_sampler()
        self.names.append(await self._reload(self.run.paths[0]))
        for number in range(streams):
            stream = TokenStream(
                self._client,
                sampler,
                number=self._number * streams + number,
                vocabulary=self._vocabulary,
                tokens=tokens,
                on_version=partial(self._note, number),
            )
            self.streams.append(stream)
            self._tasks.append(asyncio.create_task(stream.run()))
        await self._until_all_show(self.names[0])

    async def swap(self, path: int) -> Swap:
        """Have the live sampler follow checkpoint number ``path``. Return once every stream has a token of that version."""
        self._first_seen.clear()
        asked = perf_counter()
        self.asked.append(asked)
        version = await self._reload(self.run.paths[path])
        answered = perf_counter()
        self.names.append(version)
        await self._until_all_show(version)
        return Swap(asked, answered, self._first_seen[version], perf_counter())

    async def finish(self) -> None:
        """Stop the streams once their present samples have ended."""
        for stream in self.streams:
            stream.stop()
        async with asyncio.timeout(_LAST_SAMPLES_SECONDS):
            await asyncio.gather(*self._tasks)

    async def _reload(self, path: str) -> str:
        version: str = (await self._client.post(f"adapters/{self.run.run}/reload", path=path))["version"]
        return version

    def _note(self, number: int) -> None:
        stream = self.streams[number]
        if stream.shown is not None:
            self._first_seen.setdefault(stream.shown, stream.shown_at)
        self._changed.set()

    async def _until_all_show(self, version: str) -> None:
        try:
            async with asyncio.timeout(_SWAP_SECONDS):
                while any(stream.shown != version for stream in self.streams):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            stuck = [stream.samples[-1] for stream in self.streams if stream.shown != version]
            seen = [(sample.request_id, len(sample.tokens), sample.changes[-1:], sample.failure) for sample in stuck]
            raise RuntimeError(f"not on {version} after {_SWAP_SECONDS:.0f} s: {seen}") from None

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.__aexit__(kind, error, trace)
