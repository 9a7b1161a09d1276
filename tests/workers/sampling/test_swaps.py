"""Publications that come faster than a sample's prompt is read: the sample gets its tokens all the same."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from contracts.operations import SampleOutput
from engine.sampling.replica import GenerateEvent, GenerateRequest, NewToken
from store.clock import utc_now
from store.database import Database, create_engine
from tenants.gates import make_gates
from tests.workers.sampling.test_dispatch import BASE, SECONDS, Dispatches, LiveRun, live_run, runtime_of
from tests.workers.sampling.test_request_streams import ScriptedReplica
from workers.sampling.continuation import Continuation
from workers.sampling.dispatch import Dispatcher
from workers.sampling.gate_cache import GateCache
from workers.sampling.in_flight_rows import InFlightRows
from workers.sampling.open_attempts import OpenAttempts
from workers.sampling.router import Router
from workers.sampling.sample_runner import History, SampleRunner
from workers.sampling.stop_conditions import StopRules
from workers.sampling.swap import Swap


class SlowReader:
    """Replica that reads a prompt until the test says that it is read, and tells when it begins one."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[GenerateRequest] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.replica = ScriptedReplica(self._play)

    async def _play(self, request: GenerateRequest, _number: int) -> AsyncGenerator[Sequence[GenerateEvent]]:
        self.begun.put_nowait(request)
        await self.reads.wait()
        for place in range(request.max_tokens):
            yield [NewToken(index, 7 + place, -1.0) for index in range(len(request.seeds))]
            # The publication's cut comes between two tokens.
            await asyncio.sleep(0)

    async def next(self) -> str:
        """Return the version from which the next request draws."""
        request = await asyncio.wait_for(self.begun.get(), SECONDS)
        assert request.adapter is not None
        return request.adapter.name


async def test_a_sample_that_was_cut_before_its_first_token_draws_before_it_is_cut_again(
    database_url: str, tmp_path: Path
) -> None:
    reader = SlowReader()
    database = Database(create_engine(database_url))
    runtime = runtime_of(database, tmp_path)
    router = Router([reader.replica])
    gate_cache = GateCache(runtime, BASE)
    attempts, rows = OpenAttempts(router, gate_cache), InFlightRows(runtime, BASE, "here")
    dispatcher, telemetry = Dispatcher(runtime, attempts, rows, router, gate_cache), runtime.telemetry.sampling(BASE)
    swap = Swap(runtime, attempts, telemetry)
    cat, dog = await live_run(database, "cat"), await live_run(database, "dog")
    world = Dispatches(database, gate_cache, attempts, rows, dispatcher, swap, cat, dog)
    async with database.write() as transaction:
        for run in (cat, dog):
            await make_gates(transaction, run.gates(), utc_now)
    claims: Any = SimpleNamespace(waiting=lambda _: nullcontext(), heartbeat=SimpleNamespace(may_draw=True))
    runner = SampleRunner(runtime, attempts, rows, dispatcher, swap, claims, router, telemetry)

    async def draw(run: LiveRun) -> SampleOutput:
        operation = run.sample()
        request: Any = operation.payload
        continuation = Continuation(operation.id, request, StopRules(4, frozenset(), (), None))
        found, report = await runner.run(operation, continuation, History())
        versions.append([span.version for span in report.sequences[0].spans])
        return found

    async def publish(run: LiveRun) -> str:
        await world.publish(run)
        await swap.leave_outdated()
        return run.version

    versions: list[list[str | None]] = []
    sample = asyncio.create_task(draw(cat))
    assert await reader.next() == cat.version
    neighbour = asyncio.create_task(draw(dog))
    assert await reader.next() == dog.version
    # The first cut comes at once, as ever.
    second = await publish(cat)
    assert await reader.next() == second
    third = await publish(cat)
    # A neighbour that was never cut so is cut at once, too.
    assert await publish(dog) == await reader.next()
    assert reader.begun.empty()
    reader.reads.set()
    assert await reader.next() == third
    found = await asyncio.wait_for(sample, SECONDS)
    await asyncio.wait_for(neighbour, SECONDS)
    assert len(found.sequences[0].tokens) == 4
    assert sorted(versions, key=len) == [[dog.version], [second, third]]
    await world.settle()
    await database.close()
