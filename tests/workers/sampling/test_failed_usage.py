"""Samples that their tenant makes fail while they are streamed: what was drawn is used, and no other tenant notices."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete, select

from api.followed_sample import followed
from api.sample_submission import SampleSubmission
from contracts.errors import EngineFailure, FutureGone, InvalidRequest, NotFound, StaleSample, Unavailable, WeftError
from contracts.ids import CheckpointId, RunId, SamplerId
from contracts.operations import LoraSettings, SampleRequest, SamplingParams
from ledger.wakeups import versions_topic
from store.clock import utc_now
from store.tables import Checkpoint, Operation, Sampler
from tenants.runs import NewRun
from tenants.samplers import NewSampler, OnStale, Staleness, bound_staleness, create_sampler, publish_live
from testing.runs import create_run
from tests.workers.sampling.test_continuation import begun, give
from tests.workers.sampling.test_dispatch import record
from tests.workers.sampling.test_handed_over import BASE, LENGTH, SECONDS, HeldReplica, Rig, Stream
from tests.workers.sampling.test_handed_over import base as base
from tests.workers.sampling.test_handed_over import rig as rig
from workers.sampling.sample_endings import FailedSample

PROMPT = np.array([5, 6, 7])


async def live_sampler(rig: Rig) -> tuple[RunId, SamplerId, CheckpointId]:
    """A run of the first tenant and a sampler that follows it, whose samples may never be older than its newest version."""
    tenant, bare = rig.samplers[0]
    async with rig.runtime.database.write() as transaction:
        found = await transaction.get(Sampler, bare)
        assert found is not None
        run = await create_run(
            transaction, tenant, NewRun(found.session_id, 0, BASE, LoraSettings(4, seed=1), None), utc_now
        )
        version = await record(transaction, tenant, run)
        new = NewSampler(found.session_id, 7, BASE, None, version, run)
        live = await create_sampler(transaction, tenant, new, utc_now)
        await bound_staleness(transaction, tenant, live, Staleness(0, OnStale.FAIL), None)
    return run, live, version


async def make_fail(rig: Rig, how: type[WeftError], run: RunId, version: CheckpointId) -> None:
    tenant = rig.samplers[0][0]
    if how is NotFound:
        await rig.pause()
        async with rig.runtime.database.write() as transaction:
            await transaction.execute(delete(Checkpoint).where(Checkpoint.id == version))
        await rig.resume()
        return
    async with rig.runtime.database.write() as transaction:
        await publish_live(transaction, tenant, run, await record(transaction, tenant, run), utc_now)
        rig.runtime.wakeups.announce_after_commit(transaction, versions_topic(BASE))


@pytest.mark.parametrize(
    ("error", "drawn"),
    [
        (InvalidRequest("weights that are not finite"), 3),
        (EngineFailure("a dead replica"), 0),
        (Unavailable("away"), 0),
    ],
)
def test_tokens_of_a_failed_sample_count_unless_the_service_has_failed_it(error: WeftError, drawn: int) -> None:
    continuation = begun()
    (request,) = continuation.requests(None, 1)
    give(continuation, request, 1, 2, 3)
    assert FailedSample.after(error, continuation).drawn == drawn


@pytest.mark.parametrize("how", [StaleSample, NotFound])
async def test_what_was_streamed_of_a_sample_that_its_tenant_has_fail_is_used(
    rig: Rig, how: type[WeftError], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, goes_on = HeldReplica.generate, asyncio.Event()

    async def bare(self: HeldReplica, request: Any) -> AsyncIterator[Any]:
        """Draw from the base: the versions have no files. The first tenant's sample stops before its end."""
        count = 0
        async for events in draw(self, replace(request, adapter=None)):
            yield events
            count += len(events)
            if request.adapter is not None and count > LENGTH // 2:
                await goes_on.wait()

    monkeypatch.setattr(HeldReplica, "generate", bare)
    run, live, version = await live_sampler(rig)
    await rig.pool()
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0, stop_tokens=[])
    asked = SampleSubmission(
        rig.samplers[0][0], live, 0, BASE, SampleRequest(PROMPT, 1, params), digest=b"a live sample"
    )
    async with followed(rig.services, asked) as sample, rig.stream(1) as beside:
        mine = Stream(sample)
        reading, beside_reading = asyncio.create_task(mine.read()), asyncio.create_task(beside.read())
        await mine.until(LENGTH // 4)
        await make_fail(rig, how, run, version)
        with pytest.raises(FutureGone, match="result"):
            await asyncio.wait_for(reading, SECONDS)
        assert (await sample.status()).error_code == how.code
        goes_on.set()
        whole = await asyncio.wait_for(beside_reading, SECONDS)
        assert beside.tokens == whole
    async with rig.runtime.database.read() as session:
        rows = await session.execute(select(Operation.id, Operation.tokens, Operation.sampled_tokens))
        used = {row.id: (row.tokens, row.sampled_tokens) for row in rows}
    tokens, drawn = used[sample.request_id]
    assert len(mine.tokens) <= drawn < LENGTH
    assert tokens == len(PROMPT) + drawn
    assert used[beside.sample.request_id] == (len(PROMPT) + LENGTH, LENGTH)
