"""Resumption: a process takes up samples of others without holding up its own."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from api.token_order import TokenOrder
from contracts.errors import StaleSample
from contracts.ids import RunId, TenantId
from contracts.operations import SampledSequence, SampleOutput, SampleRequest, SamplingParams
from contracts.prompt_cells import PromptCells
from contracts.sample_progress import SampleProgress, SavedProgress, encode_progress
from contracts.sample_report import SampleReport, SequenceReport, VersionSpan
from ledger.token_feed import TokenFeed
from tenants.samplers import OnStale, Staleness
from tests.workers.sampling.test_continuation import NEW, OLD, begun, give, sample
from workers.sampling.continuation import Continuation
from workers.sampling.resumption import Resumption
from workers.sampling.sample_runner import History, _check_age
from workers.sampling.stop_conditions import StopRules
from workers.sampling.token_publisher import TokenPublisher
from workers.sampling.weight_source import WeightSource

SECONDS = 20.0
LENGTH = 64


def saved() -> SavedProgress:
    sequence = SampledSequence("length", np.full(LENGTH, 7, np.int32), np.zeros(LENGTH, np.float32))
    report = SampleReport([SequenceReport("", [VersionSpan(None, 0, LENGTH)])], ["replica"], 1, 0.0, 0.0, "run@1")
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
        operation: Any = SimpleNamespace(id=f"a sample of {tenant}", has_progress=True, payload=request)
        continuation = Continuation(operation.id, request, rules, owner=tenant)
        await resumption.resume(operation, continuation, History())
        return continuation

    mine = asyncio.create_task(take_up("cat", StopRules(2 * LENGTH, frozenset(), ("stop",), slow)))
    await asyncio.sleep(0)
    beside = await take_up("dog", StopRules(2 * LENGTH, frozenset(), ("stop",), lambda ids: "a" * len(ids)))
    is_beside_up.set()
    taken_up = [await mine, beside]
    assert [(one.made, one.scored_version) for one in taken_up] == 2 * [(LENGTH, "run@1")]
    assert waited
    assert all(waited)


async def handed_over(publication: int | None, **asked: Any) -> tuple[Continuation, History]:
    """Return a sample after its follower has handed over three tokens of a process that told it of ``publication``."""
    first, order, feed = begun(), TokenOrder(1), TokenFeed()
    (request,) = first.requests(OLD, 1)
    give(first, request, 1, 2, 3, end=None)
    with feed.follow(("a lane", 0)) as queue:
        TokenPublisher(feed).publish(("a lane", 0), TenantId("cat"), first, 3, claim=1, publication=publication)
        order.take(queue.get_nowait())

    class Handed(Resumption):
        async def _saved(self, operation: Any) -> SavedProgress:
            return SavedProgress(encode_progress(order.progress()), is_stale=False)

    runtime: Any = None
    operation: Any = SimpleNamespace(id="a sample", has_progress=True, payload=sample(**asked))
    second, history = begun(**asked), History()
    await Handed(runtime).resume(operation, second, history)
    return second, history


def source(publication: int, on_stale: OnStale | None) -> WeightSource:
    bound = None if on_stale is None else Staleness(1, on_stale)
    return WeightSource(RunId("run"), NEW, is_live=True, publication=publication, staleness=bound)


async def test_a_bound_on_age_counts_from_the_first_token_when_a_sample_is_handed_over() -> None:
    """The first token is of publication 1. A sampler without a bound beside takes all of them."""
    for publication, on_stale, made in ((2, OnStale.FAIL, 3), (3, OnStale.RESTART, 0), (3, None, 3)):
        continuation, history = await handed_over(1)
        _check_age(continuation, history, source(publication, on_stale))
        assert continuation.made == made
    continuation, history = await handed_over(1)
    with pytest.raises(StaleSample):
        _check_age(continuation, history, source(3, OnStale.FAIL))


async def test_a_sample_whose_first_publication_nobody_told_counts_from_the_take_over() -> None:
    """A process of a version before tells followers of none."""
    continuation, history = await handed_over(None)
    _check_age(continuation, history, source(3, OnStale.FAIL))
    assert (continuation.made, history.first_publication) == (3, 3)


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt_logprobs": True},
        {"topk_prompt_logprobs": 2},
        {"target_prompt_logprobs": PromptCells(np.array([[7], [8]]), 1)},
        {"prompt_alt_tokens_k": 1},
        {"topk_sample_logprobs": 2},
    ],
    ids=lambda asked: next(iter(asked)),
)
async def test_tokens_without_the_scores_that_are_asked_for_are_drawn_again(asked: dict[str, Any]) -> None:
    """An API of a version before hands over what it has. A sample beside that asks for no scores goes on."""
    (mine, history), (beside, _) = await handed_over(1, **asked), await handed_over(1)
    assert (mine.made, history.first_publication, beside.made) == (0, None, 3)
    (request,) = mine.requests(NEW, 2)
    assert (request.scoring is None) == ("topk_sample_logprobs" in asked)
