"""Many tenants' clients in one light process: each keeps so many samples open, and some train.

A sample is an ``asample``, then polls of ``retrieve_future`` until the answer comes, as in the SDK. The next sample follows
at once.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from itertools import count
from time import monotonic
from typing import Any

import aiohttp
import numpy as np
import uvloop

from bench.clients.weft_client import LearningRun, WeftClient, sample_body
from bench.processes.json_process import give_answer, given_task

PROMPT_TOKENS = 16
HUNG_SECONDS = 120.0
"""Seconds after which a request without an answer counts as hung."""
_SHOWN_ERRORS = 10


@dataclass(frozen=True, slots=True)
class LoadTask:
    """Task: sample and train until ``ends`` (seconds of ``time.monotonic``), then wait for the open requests.

    Every tenant of ``sampling_keys`` keeps ``concurrent`` samples of ``sample_tokens`` tokens open. The first samples begin
    spread over ``ramp_seconds``.
    """

    base_url: str
    base_model: str
    vocabulary: int
    sampling_keys: list[str]
    training_keys: list[str]
    concurrent: int
    sample_tokens: int
    ramp_seconds: float
    ends: float


@dataclass(slots=True)
class Outcome:
    """Answers as (sent, answered), in seconds of ``time.monotonic``. A step is two operations."""

    samples: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    errors: int = 0
    shown_errors: list[str] = field(default_factory=list)
    hung: int = 0

    def note_error(self, error: BaseException) -> None:
        """Count the error, and keep the text of the first few."""
        self.errors += 1
        if len(self.shown_errors) < _SHOWN_ERRORS:
            self.shown_errors.append(repr(error)[:300])


class LoadClients:
    """The clients of all tenants."""

    def __init__(self, task: LoadTask) -> None:
        self._task = task
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Sample and train until the task ends."""
        async with AsyncExitStack() as stack:
            sampling = [await self._client(stack, key) for key in self._task.sampling_keys]
            training = [await self._client(stack, key) for key in self._task.training_keys]
            runs = await asyncio.gather(*(self._run_of(client) for client in (*sampling, *training)))
            loops = [self._sample_on(run, number) for number, run in enumerate(runs[: len(sampling)])]
            loops += [self._train_on(run) for run in runs[len(sampling) :]]
            await asyncio.gather(*loops)
        return self.outcome

    async def _client(self, stack: AsyncExitStack, key: str) -> WeftClient:
        return await stack.enter_async_context(WeftClient(self._task.base_url, key))

    async def _run_of(self, client: WeftClient) -> LearningRun:
        run = await LearningRun.create(client, base_model=self._task.base_model, vocabulary=self._task.vocabulary)
        await run.save(1)
        return run

    async def _sample_on(self, run: LearningRun, tenant: int) -> None:
        sampler = await run.pinned_sampler(run.paths[0])
        numbers, prompts = count(), np.random.default_rng(tenant)
        pause = self._task.ramp_seconds / self._task.concurrent

        async def keep_open(place: int) -> None:
            await asyncio.sleep(place * pause)
            while monotonic() < self._task.ends:
                number = next(numbers)
                prompt = prompts.integers(0, self._task.vocabulary, size=PROMPT_TOKENS).tolist()
                await self._counted(self._sample(run.client, sampler, number, prompt), self.outcome.samples)

        await asyncio.gather(*(keep_open(place) for place in range(self._task.concurrent)))

    async def _sample(self, client: WeftClient, sampler: str, number: int, prompt: Sequence[int]) -> None:
        wanted = self._task.sample_tokens
        promise = await client.post("asample", **sample_body(sampler, number, prompt, max_tokens=wanted, seed=number))
        result = await client.result(promise)
        made = len(result["sequences"][0]["tokens"])
        if made != wanted:
            raise RuntimeError(f"a sample has {made} tokens of {wanted}")

    async def _train_on(self, run: LearningRun) -> None:
        while monotonic() < self._task.ends:
            await self._counted(run.step(), self.outcome.steps)

    async def _counted(self, work: Any, answered: list[tuple[float, float]]) -> None:
        sent = monotonic()
        try:
            async with asyncio.timeout(HUNG_SECONDS):
                await work
        except TimeoutError:
            self.outcome.hung += 1
        except (RuntimeError, aiohttp.ClientError, OSError) as error:
            self.outcome.note_error(error)
            # A service that fails at once must not be asked without end.
            await asyncio.sleep(0.5)
        else:
            answered.append((sent, monotonic()))


def main() -> None:
    """Read the task, run it, and write the outcome."""
    outcome = uvloop.run(LoadClients(LoadTask(**given_task())).run())
    give_answer(asdict(outcome))


if __name__ == "__main__":
    main()
