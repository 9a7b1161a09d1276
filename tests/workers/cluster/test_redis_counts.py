"""Processes that share a Redis count requests together. Without it each counts by itself, and says so."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from contracts.ids import TenantId
from tenants.request_rates import RequestRate, RequestRates, RequestScope
from testing.cluster_process import RedisProcess
from tests.conftest import need_redis
from workers.cluster.redis_counts import RedisCounts

MOST = 7
PATIENCE_SECONDS = 3.0
"""More than weft's own: a busy machine may stand still for as long."""
CATS, DOGS = (RequestRate(TenantId(name), RequestScope.TENANT, name, MOST) for name in ("cats", "dogs"))


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    need_redis()
    for module in ("tenants.request_rates", "workers.cluster.redis_counts"):
        monkeypatch.setattr(f"{module}.PATIENCE_SECONDS", PATIENCE_SECONDS)
    with RedisProcess(tmp_path / "redis") as process:
        yield process


@pytest_asyncio.fixture
async def processes(redis: RedisProcess) -> AsyncIterator[list[RequestRates]]:
    counts = [RedisCounts(redis.url, "weft-test") for _ in range(3)]
    yield [RequestRates(one.storage) for one in counts]
    for one in counts:
        await one.close()


async def let_in(processes: list[RequestRates], rate: RequestRate, times: int) -> int:
    """Send requests to all processes at once; return how many were let in."""
    asked = [process.count([rate]) for process in processes for _ in range(times)]
    return sum(is_let_in for _, is_let_in in await asyncio.gather(*asked))


async def until_shared(process: RequestRates, *, shared: bool) -> None:
    async with asyncio.timeout(60):
        while process.counts_alone == shared:
            await process.look()
            await asyncio.sleep(0.05)


async def test_processes_admit_as_many_together_as_one_and_tell_the_same_wait(processes: list[RequestRates]) -> None:
    assert await let_in(processes, CATS, 5) == MOST
    counts = [await process.of(CATS) for process in processes]
    assert {(count.used, count.remaining) for count in counts} == {(MOST, 0)}
    assert all(30 <= count.seconds <= 60 for count in counts)
    assert await let_in(processes, DOGS, 2) == 6
    assert not any(process.counts_alone for process in processes)


@pytest.mark.parametrize("outage", ["killed", "frozen"])
async def test_without_redis_each_process_counts_by_itself_until_it_is_back(
    processes: list[RequestRates], redis: RedisProcess, outage: str
) -> None:
    assert await let_in(processes, CATS, 5) == MOST
    redis.kill() if outage == "killed" else redis.freeze()
    began = asyncio.get_running_loop().time()
    assert await let_in(processes, CATS, 9) == MOST * len(processes)
    assert asyncio.get_running_loop().time() - began < 8 * PATIENCE_SECONDS
    assert all(process.counts_alone for process in processes)
    redis.start() if outage == "killed" else redis.thaw()
    for process in processes:
        await until_shared(process, shared=True)
    # A Redis that was restarted is empty; one that was frozen remembers.
    assert await let_in(processes, CATS, 5) == (MOST if outage == "killed" else 0)
