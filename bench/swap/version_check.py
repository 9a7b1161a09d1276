"""Checks streamed tokens: each token must be of the version that the stream names, and that version must have been due."""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.swap.token_streams import Arrival, Sample, Span
from contracts.base_model import read_base_model_facts
from engine.model.base import BaseModel
from engine.sampling.in_process.replica import TorchReplica
from engine.sampling.replica import AdapterVersion, GenerateRequest, PromptScored, PromptScoring

TOLERANCE = 1e-3
"""Largest difference between vLLM's and torch's logprob of a token, both in float32."""
_AT_ONCE = 8
_COMPARED_SPANS = 40


def undue_tokens(arrivals: Sequence[Arrival], names: Sequence[str], asked: Sequence[float]) -> int:
    """Return the number of tokens of a stream whose version was not due: ``names[k + 1]`` was asked for at ``asked[k]``.

    Due is the newest version asked for. The version before it is due, too, until the stream has shown the newest.
    """
    wrong, shown = 0, -1
    for arrival in arrivals:
        newest = bisect_right(asked, arrival.at)
        if arrival.version == names[newest]:
            shown = newest
        elif shown == newest or arrival.version != names[newest - 1]:
            wrong += arrival.tokens
    return wrong


def unlike_tokens(sample: Sample) -> int:
    """Return the number of tokens that a finished sample's last event or report tells otherwise than the stream did."""
    if sample.done is None or sample.report is None:
        return 0
    told: list[int] = sample.done["sequences"][0]["tokens"]
    wrong = sum(a != b for a, b in zip(told, sample.tokens, strict=False)) + abs(len(told) - len(sample.tokens))
    spans = [(span["version"], span["start"], span["end"]) for span in sample.report["sequences"][0]["spans"]]
    return wrong + sum(a != b for a, b in zip(_versions(spans), _versions(sample.spans), strict=False))


def _versions(spans: Sequence[Span]) -> list[str]:
    return [version for version, start, end in spans for _ in range(start, end)]


@dataclass(frozen=True, slots=True)
class Scored:
    """Result of the check: ``wrong`` of ``tokens`` tokens do not have the logprob that their version gives them.

    ``told_apart``: fraction of the tokens whose logprob is different under the version before or after. Only for these can
    the check see a wrong version.
    """

    tokens: int
    wrong: int
    told_apart: float


def score(model: Path, checkpoints: Path, samples: Sequence[Sample]) -> Scored:
    """Recompute the logprob of every streamed token with torch, under its version in ``checkpoints``, one pass for each span."""
    base = BaseModel.load(read_base_model_facts("scored", model, None), dtype="float32", device="cpu")
    return asyncio.run(_Scorer(base, checkpoints).score(samples))


class _Scorer:
    def __init__(self, base: BaseModel, checkpoints: Path) -> None:
        self._replica = TorchReplica(base)
        self._checkpoints = checkpoints
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def score(self, samples: Sequence[Sample]) -> Scored:
        await self._replica.start()
        try:
            spans = [(sample, span) for sample in samples for span in sample.spans]
            off = await asyncio.gather(*(self._off(sample, span, span[0]) for sample, span in spans))
            swapped = [(sample, number) for sample in samples for number in range(1, len(sample.spans))]
            every = max(1, len(swapped) // _COMPARED_SPANS)
            apart = await asyncio.gather(
                *(
                    self._off(sample, sample.spans[number], sample.spans[number - 1][0])
                    for sample, number in swapped[::every]
                )
            )
        finally:
            await self._replica.close()
        wrong = np.concatenate(off) if off else np.zeros(0, bool)
        seen = np.concatenate(apart) if apart else np.zeros(0, bool)
        return Scored(len(wrong), int(wrong.sum()), float(seen.mean()) if len(seen) else 0.0)

    async def _off(self, sample: Sample, span: Span, version: str) -> NDArray[np.bool_]:
        """Return, for each token of the span, whether ``version`` gives it another logprob."""
        _, start, end = span
        prompt = np.array(sample.prompt + sample.tokens[:end], np.int64)
        first = len(sample.prompt) + start
        request = GenerateRequest(
            request_id=f"{sample.request_id}/{start}/{version}",
            prompt=prompt,
            seeds=(0,),
            max_tokens=1,
            scoring=PromptScoring(first, logprobs=True, topk=0),
            adapter=AdapterVersion(version, self._checkpoints / version),
        )
        async with self._places:
            events = [event async for batch in self._replica.generate(request) for event in batch]
        (scored,) = [event for event in events if isinstance(event, PromptScored)]
        if scored.logprobs is None:
            raise RuntimeError("the prompt was not scored")
        difference = np.abs(scored.logprobs[first:] - np.array(sample.logprobs[start:end], np.float32))
        return ~(difference <= TOLERANCE)
