"""Reasons for which a claimed sample waits, told while it is so. A second tenant's sample is drawn beside it."""

import asyncio
from time import monotonic

from contracts.ids import RequestId
from contracts.waiting import Wait, WaitReason
from ledger.attempts import count_attempts
from ledger.waiting import Waits
from store.clock import utc_now
from tenants.samplers import join_sampler
from tests.workers.sampling.bare_samples import Drawer, make_drawer
from tests.workers.sampling.test_handed_over import SECONDS, Rig, base, cluster, rig

__all__ = ["base", "cluster", "rig"]

LONG = 200


async def until_told(rig: Rig, request: RequestId, reason: WaitReason | None) -> Wait | None:
    """Wait until the request's reason is ``reason``, None for its end, and return the wait."""
    waits = Waits(rig.runtime.database, rig.runtime.settings, rig.runtime.data_folder, utc_now)
    ends = monotonic() + SECONDS
    while True:
        found = await waits.of(request)
        if (found and found.reason) is reason:
            return found
        assert monotonic() < ends, f"not {reason} in time, but {found}"
        await asyncio.sleep(0.01)


async def test_a_sample_whose_sampler_is_being_changed_is_told_as_claimed(cluster: Rig) -> None:
    """A second client joins the sampler, and its transaction lasts: no sample of it is dispatched meanwhile."""
    cats, dogs = await make_drawer(cluster.runtime), await make_drawer(cluster.runtime)
    await cluster.pool()
    async with cluster.runtime.database.write() as joining:
        await join_sampler(joining, cats.tenant, cats.sampler)
        mine = await cats.send(5)
        wait = await until_told(cluster, mine, WaitReason.CLAIMED)
        assert wait is not None
        assert (wait.cause, wait.queue_state) == (WaitReason.CLAIMED, "active")
        assert "no change of its sampler" in wait.text
        await dogs.result(await dogs.send(6))
        await until_told(cluster, mine, WaitReason.CLAIMED)
    assert len((await cats.result(mine)).sequences) == 1
    await until_told(cluster, mine, None)


async def suspect(rig: Rig, drawer: Drawer, first_token: int) -> RequestId:
    """Send a sample that may be drawn once more, as after the deaths of processes that drew it."""
    request = await drawer.send(first_token, tokens=LONG)
    for _ in range(rig.runtime.settings.max_attempts - 1):
        async with rig.runtime.database.write() as transaction:
            await count_attempts(transaction, [request])
    return request


async def test_a_claimed_suspect_that_waits_for_another_one_says_so(rig: Rig) -> None:
    """Both are claimed, and one of them is drawn: its replica stands still."""
    cats, dogs = await make_drawer(rig.runtime), await make_drawer(rig.runtime)
    suspects = [await suspect(rig, cats, number) for number in (5, 6)]
    pool = await rig.pool()
    pool.source.replica.running.clear()
    first, second = suspects
    await until_told(rig, first, WaitReason.RUNNING)
    # Claimed with the other one, in one look.
    assert (await cats.row(second)).taken_by is not None
    wait = await until_told(rig, second, WaitReason.SUSPECT_ALONE)
    assert wait is not None
    assert (wait.queue_state, "a process died" in wait.text) == ("paused_capacity", True)
    beside = await dogs.send(7, tokens=4)
    await until_told(rig, beside, WaitReason.RUNNING)
    pool.source.replica.running.set()
    for drawer, request in ((dogs, beside), (cats, first), (cats, second)):
        assert len((await drawer.result(request)).sequences) == 1
