"""Resumption: a process takes up samples of others without holding up its own."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from contracts.operations import SampledSequence, SampleOutput, SampleRequest, SamplingParams
from contracts.sample_progress import SampleProgress, SavedProgress, encode_progress
from contracts.sample_report import SampleReport, SequenceReport, VersionSpan
from workers.sampling.continuation import Continuation
from workers.sampling.resumption import Resumption
from workers.sampling.sample_runner import History
from workers.sampling.stop_conditions import StopRules

SECONDS = 20.0
LENGTH = 64


def saved() -> SavedProgress:
    sequence = SampledSequence("length", np.full(LENGTH, 7, np.int32), np.zeros(LENGTH, np.float32))
    report = SampleReport([SequenceReport("", [VersionSpan(None, 0, LENGTH)])], ["replica"], 1, 0.0, 0.0)
    return SavedProgress(encode_progress(SampleProgress(SampleOutput([sequence]), report)), is_stale=False)


async def test_a_sample_that_takes_long_to_take_up_holds_up_no_other_tenants() -> None:
    """The text of one is decoded only once the other one's has been."""
    is_beside_up, waited = threading.Event(), list[bool]()

    def slow(ids: list[int]) -> str:
        waited.append(is_beside_up.wait(SECONDS))
        return "a" * len(ids)

    class Found(Resumption):
        async def _saved(self, operation: Any) -> SavedProgress:
            return saved()

    runtime: Any = None
    resumption = Found(runtime)

    async def take_up(tenant: str, rules: StopRules) -> Continuation:
        request = SampleRequest(np.array([5, 6, 7]), 1, SamplingParams(seed=1))
        operation: Any = SimpleNamespace(id=f"a sample of {tenant}", has_progress=True)
        continuation = Continuation(operation.id, request, rules, owner=tenant)
        await resumption.resume(operation, continuation, History())
        return continuation

    mine = asyncio.create_task(take_up("cat", StopRules(2 * LENGTH, frozenset(), ("stop",), slow)))
    await asyncio.sleep(0)
    beside = await take_up("dog", StopRules(2 * LENGTH, frozenset(), ("stop",), lambda ids: "a" * len(ids)))
    is_beside_up.set()
    assert [(await mine).made, beside.made] == [LENGTH, LENGTH]
    assert waited
    assert all(waited)
