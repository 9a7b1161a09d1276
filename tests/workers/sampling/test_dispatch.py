"""Samples of two tenants that go to their replica in one transaction; SQLite and PostgreSQL."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from sqlalchemy import delete, event

from contracts.base_model import BaseModelFacts, read_base_model_facts
from contracts.errors import EngineFailure, NotFound
from contracts.ids import CheckpointId, RequestId, RunId, SamplerId, TenantId
from contracts.ledger_records import ReadyOperation
from contracts.operations import LoraSettings, OperationKind, SampleRequest, SamplingParams
from contracts.paths import Segment
from engine.sampling.replica import GenerateRequest
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.settings import VllmReplicaSettings
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.publication import LocalPublication
from ledger.runtime import Runtime
from ledger.token_feed import TokenFeed
from ledger.wakeups import Wakeups
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.settings import Settings
from store.tables import AdapterGate
from telemetry.telemetry import Telemetry
from tenants.checkpoints import NewCheckpoint, new_checkpoint_id, record_checkpoint
from tenants.gates import (
    Dispatch,
    GateMode,
    Pause,
    clear_all_in_flight,
    clear_in_flight,
    flights_of,
    in_flight,
    make_gates,
    mark_in_flight,
    pause_gate,
    resume_gate,
)
from tenants.runs import NewRun
from tenants.samplers import NewSampler, create_sampler, publish_live
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.runs import create_run
from workers.sampling.attempt import Attempt, AttemptState
from workers.sampling.claims import HeldBack
from workers.sampling.dispatch import Dispatcher
from workers.sampling.gate_cache import GateCache
from workers.sampling.gate_cuts import GateCuts
from workers.sampling.in_flight_rows import InFlightRows
from workers.sampling.open_attempts import OpenAttempts
from workers.sampling.publishing import withdraw
from workers.sampling.router import Router
from workers.sampling.swap import Swap

BASE = "weft/tiny"
SECONDS = 60.0
BLOCKED_SECONDS = 0.5


@dataclass
class LiveRun:
    """A tenant's run with two live samplers on its only version."""

    tenant: TenantId
    run: RunId
    version: CheckpointId
    samplers: list[SamplerId]

    def sample(self, sampler: str | None = None) -> ReadyOperation:
        """One that waits for its dispatch."""
        request = SampleRequest(np.array([1, 2]), 1, SamplingParams(max_tokens=4))
        lane = self.samplers[0] if sampler is None else sampler
        return ReadyOperation(RequestId(str(uuid4())), 1, self.tenant, lane, 1, OperationKind.SAMPLE, request, 0)

    def gates(self, operation: str = "none") -> Dispatch:
        """The gates before its samples."""
        return Dispatch(RequestId(operation), self.tenant, BASE, self.run, "v", "a", "another")


@dataclass
class Dispatches:
    """Two tenants' runs and who dispatches their samples."""

    database: Database
    gate_cache: GateCache
    attempts: OpenAttempts
    rows: InFlightRows
    dispatcher: Dispatcher
    swap: Swap
    cat: LiveRun
    dog: LiveRun

    async def in_flight(self, run: LiveRun) -> int:
        """Return the number of samples noted."""
        async with self.database.read() as session:
            return await in_flight(session, run.run)

    async def versions(self, run: LiveRun) -> dict[str, list[str]]:
        """The versions that its samples are noted to be drawn from, by replica."""
        async with self.database.read() as session:
            return {one.replica: [one.version or ""] for one in await flights_of(session, [run.run])}

    async def publish(self, run: LiveRun) -> None:
        """Have its samplers follow a new version."""
        async with self.database.write() as transaction:
            version = await record(transaction, run.tenant, run.run)
            await publish_live(transaction, run.tenant, run.run, version, utc_now)
        run.version = version

    async def settle(self) -> None:
        """See ``SampleRunner.settle``."""
        await self.rows.settle()
        await self.dispatcher.settle()

    @contextmanager
    def notes(self) -> Iterator[list[str]]:
        """The statements that note samples as in flight, as they are executed."""
        seen: list[str] = []

        def see(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("INSERT INTO samples_in_flight"):
                seen.append(statement)

        engine = self.database.engine.sync_engine
        event.listen(engine, "before_cursor_execute", see)
        yield seen
        event.remove(engine, "before_cursor_execute", see)


async def record(transaction: Any, tenant: TenantId, run: RunId) -> CheckpointId:
    version = new_checkpoint_id()
    new = NewCheckpoint(version, run, Segment.SAMPLER_WEIGHTS, version, 1, None, False, None)
    await record_checkpoint(transaction, tenant, new, utc_now)
    return version


async def live_run(database: Database, name: str) -> LiveRun:
    async with database.write() as transaction:
        tenant = await create_tenant(transaction, name=name, clock=utc_now)
        session = await create_session(transaction, tenant, NewSession([], None, "", None, None), utc_now)
        run = await create_run(transaction, tenant, NewRun(session, 0, BASE, LoraSettings(4, seed=1), None), utc_now)
        version = await record(transaction, tenant, run)
        samplers = [
            await create_sampler(transaction, tenant, NewSampler(session, number, BASE, None, version, run), utc_now)
            for number in range(2)
        ]
    return LiveRun(tenant, run, version, samplers)


def replica(name: str, facts: BaseModelFacts, folder: Path) -> VllmReplica:
    """One that is never started: a dispatch chooses it and says nothing to it."""
    settings = VllmReplicaSettings(
        name=name,
        base_url="http://127.0.0.1:9",
        served_model=BASE,
        base=facts,
        zero_adapter=folder / "zero",
        max_lora_rank=8,
        max_loras=4,
        max_resident=4,
    )
    return VllmReplica(settings)


def runtime_of(database: Database, folder: Path) -> Runtime:
    wakeups, telemetry = Wakeups(), Telemetry.of("test", utc_now)
    return Runtime(
        settings=Settings(data_dir=folder),
        database=database,
        ledger=Ledger(database, wakeups, utc_now, telemetry, PayloadFiles(DataFolder(folder))),
        wakeups=wakeups,
        feed=TokenFeed(),
        publication=LocalPublication(),
        data_folder=DataFolder(folder),
        clock=utc_now,
        telemetry=telemetry,
    )


@pytest.fixture
async def dispatches(database_url: str, tiny_model_dir: Path, tmp_path: Path) -> AsyncIterator[Dispatches]:
    database = Database(create_engine(database_url))
    facts = replace(read_base_model_facts(BASE, tiny_model_dir, None), context_length=64)
    runtime = runtime_of(database, tmp_path)
    router = Router([replica(name, facts, tmp_path) for name in ("a", "b")])
    gate_cache = GateCache(runtime, BASE)
    attempts = OpenAttempts(router, gate_cache)
    rows = InFlightRows(runtime, BASE, "here")
    dispatcher = Dispatcher(runtime, attempts, rows, router, gate_cache)
    swap = Swap(runtime, attempts, runtime.telemetry.sampling(BASE))
    cat, dog = await live_run(database, "cat"), await live_run(database, "dog")
    async with database.write() as transaction:
        for run in (cat, dog):
            await make_gates(transaction, run.gates(), utc_now)
    yield Dispatches(database, gate_cache, attempts, rows, dispatcher, swap, cat, dog)
    await database.close()


async def test_samples_that_come_together_share_a_transaction_and_each_has_its_own_answer(
    dispatches: Dispatches,
) -> None:
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    asked = [cat.sample(), dog.sample(), cat.sample("no such sampler"), cat.sample(dog.samplers[0]), dog.sample()]
    with dispatches.notes() as notes:
        found = await asyncio.gather(*(dispatcher.dispatch(one, 1) for one in asked), return_exceptions=True)
    assert len(notes) == 1
    assert [type(one) for one in found] == [Attempt, Attempt, NotFound, NotFound, Attempt]
    names = [one.source.name for one in found if isinstance(one, Attempt)]
    assert names == [cat.version, dog.version, dog.version]
    assert (await dispatches.in_flight(cat), await dispatches.in_flight(dog)) == (1, 2)
    assert len(set(dispatches.attempts)) == 3


async def test_samples_of_one_round_are_spread_over_replicas_as_those_of_many_are(dispatches: Dispatches) -> None:
    """A session's own replica takes them until it has a quarter more than its share."""
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    asked = [run.sample() for run in (cat, dog) for _ in range(8)]
    found = await asyncio.gather(*(dispatcher.dispatch(one, 2) for one in asked))
    counts = Counter(attempt.routed.name for attempt in found if attempt is not None)
    assert sum(counts.values()) == 16
    assert max(counts.values()) <= 11
    loads = {attempt.routed.name: attempt.routed.sequences for attempt in found if attempt is not None}
    assert loads == {name: 2 * count for name, count in counts.items()}
    for attempt in found:
        assert attempt is not None
        dispatches.attempts.end(attempt)
        dispatches.attempts.end(attempt)
        assert attempt.routed.sequences >= 0
    assert {attempt.routed.sequences for attempt in found if attempt is not None} == {0}


async def test_a_paused_adapters_sample_waits_and_its_neighbours_in_the_same_round_runs(dispatches: Dispatches) -> None:
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    async with dispatches.database.write() as transaction:
        # This process has not heard of it.
        await pause_gate(
            transaction, cat.run, tenant=cat.tenant, base_model=BASE, pause=Pause(GateMode.KEEP), clock=utc_now
        )
    paused = asyncio.create_task(dispatcher.dispatch(cat.sample(), 1, waiting=nullcontext))
    running = await asyncio.wait_for(dispatcher.dispatch(dog.sample(), 1), SECONDS)
    assert running is not None
    await asyncio.wait([paused], timeout=BLOCKED_SECONDS)
    assert not paused.done()
    assert set(dispatches.attempts) == {running}
    assert (await dispatches.in_flight(cat), await dispatches.in_flight(dog)) == (0, 1)
    async with dispatches.database.write() as transaction:
        await resume_gate(transaction, cat.run, generation=None, clock=utc_now)
    await dispatches.gate_cache.refresh()
    assert await asyncio.wait_for(paused, SECONDS) in set(dispatches.attempts)
    assert (await dispatches.in_flight(cat), await dispatches.in_flight(dog)) == (1, 1)


async def test_a_paused_adapters_sample_without_tokens_is_held_back_by_its_gate(dispatches: Dispatches) -> None:
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    async with dispatches.database.write() as transaction:
        await pause_gate(
            transaction, cat.run, tenant=cat.tenant, base_model=BASE, pause=Pause(GateMode.KEEP), clock=utc_now
        )
    with pytest.raises(HeldBack) as held:
        await asyncio.wait_for(dispatcher.dispatch(cat.sample(), 1), SECONDS)
    assert held.value.gate == cat.run
    assert await asyncio.wait_for(dispatcher.dispatch(dog.sample(), 1), SECONDS) is not None
    assert (await dispatches.in_flight(cat), await dispatches.in_flight(dog)) == (0, 1)


@pytest.mark.parametrize("has_row", [True, False])
async def test_a_lock_on_one_tenants_gate_holds_up_no_other_tenant(dispatches: Dispatches, has_row: bool) -> None:
    """A controller's connection hangs in the middle of its pause, of an adapter that has a gate already or has none."""
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    if dispatches.database.has_one_service:
        pytest.skip("SQLite has one writer at a time and no locks on rows")
    if not has_row:
        async with dispatches.database.write() as transaction:
            await transaction.execute(delete(AdapterGate).where(AdapterGate.run_id == cat.run))
    async with dispatches.database.write() as hanging:
        await pause_gate(
            hanging, cat.run, tenant=cat.tenant, base_model=BASE, pause=Pause(GateMode.KEEP), clock=utc_now
        )
        locked = asyncio.create_task(dispatcher.dispatch(cat.sample(), 1))
        for _ in range(3):
            assert await asyncio.wait_for(dispatcher.dispatch(dog.sample(), 1), SECONDS) is not None
        assert not locked.done()
        await hanging.rollback()
    assert await asyncio.wait_for(locked, SECONDS) is not None
    assert (await dispatches.in_flight(cat), await dispatches.in_flight(dog)) == (1, 3)


async def test_a_lock_on_one_tenants_sampler_holds_up_no_other_tenant(dispatches: Dispatches) -> None:
    """A publication hangs between its statements and its commit."""
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    if dispatches.database.has_one_service:
        pytest.skip("SQLite has one writer at a time and no locks on rows")
    async with dispatches.database.write() as hanging:
        version = await record(hanging, cat.tenant, cat.run)
        await publish_live(hanging, cat.tenant, cat.run, version, utc_now)
        locked = asyncio.create_task(dispatcher.dispatch(cat.sample(), 1))
        for _ in range(3):
            assert await asyncio.wait_for(dispatcher.dispatch(dog.sample(), 1), SECONDS) is not None
        assert not locked.done()
    assert await asyncio.wait_for(locked, SECONDS) is not None
    assert (await dispatches.in_flight(cat), await dispatches.in_flight(dog)) == (1, 3)


async def test_a_sample_that_is_given_up_in_its_round_leaves_no_attempt(dispatches: Dispatches) -> None:
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    async with dispatches.database.write() as publication:
        version = await record(publication, cat.tenant, cat.run)
        await publish_live(publication, cat.tenant, cat.run, version, utc_now)
        given_up = asyncio.create_task(dispatcher.dispatch(cat.sample(), 1))
        # The round has begun, and waits for the publication.
        await asyncio.wait([given_up], timeout=BLOCKED_SECONDS)
        assert not given_up.done()
        given_up.cancel()
        kept = asyncio.create_task(dispatcher.dispatch(dog.sample(), 1))
    attempt = await asyncio.wait_for(kept, SECONDS)
    assert given_up.cancelled()
    assert set(dispatches.attempts) == {attempt}


async def test_a_sample_that_is_given_up_while_its_round_runs_leaves_no_row(
    dispatches: Dispatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses of its run would wait for the row. A neighbour's sample of the same round goes to its replica."""
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    is_marked, may_commit, mark = asyncio.Event(), asyncio.Event(), InFlightRows.mark

    async def mark_slowly(rows: InFlightRows, *asked: Any) -> Any:
        found = await mark(rows, *asked)
        is_marked.set()
        await may_commit.wait()
        return found

    monkeypatch.setattr(InFlightRows, "mark", mark_slowly)
    given_up = asyncio.create_task(dispatcher.dispatch(cat.sample(), 1))
    kept = asyncio.create_task(dispatcher.dispatch(dog.sample(), 1))
    async with asyncio.timeout(SECONDS):
        await is_marked.wait()
        given_up.cancel()
        await asyncio.wait([given_up])
        may_commit.set()
        assert set(dispatches.attempts) == {await kept}
        await dispatches.settle()
    assert (await dispatches.in_flight(cat), await dispatches.in_flight(dog)) == (0, 1)


async def test_after_settling_nothing_is_noted_for_a_process_that_stops(dispatches: Dispatches) -> None:
    """A round goes on when all its samples are given up: notes that came later would be of a process that is gone."""
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    async with dispatches.database.write() as transaction:
        await mark_in_flight(transaction, [dog.gates(dog.sample().id)], utc_now)
    sample = cat.sample()
    async with dispatches.database.write() as other:
        # The round waits: another process notes the same sample.
        await mark_in_flight(other, [cat.gates(sample.id)], utc_now)
        given_up = asyncio.create_task(dispatcher.dispatch(sample, 1))
        await asyncio.wait([given_up], timeout=BLOCKED_SECONDS)
        given_up.cancel()
        settling = asyncio.create_task(dispatches.settle())
        await asyncio.wait([settling], timeout=BLOCKED_SECONDS)
        assert not settling.done()
    await asyncio.wait_for(settling, SECONDS)
    async with dispatches.database.write() as transaction:
        await clear_all_in_flight(transaction, "here")
    await asyncio.wait([asyncio.create_task(dispatches.settle())], timeout=BLOCKED_SECONDS)
    assert set(dispatches.attempts) == set()
    assert (await dispatches.in_flight(cat), await dispatches.in_flight(dog)) == (0, 1)


async def left_for_a_newer(dispatches: Dispatches, run: LiveRun) -> Attempt:
    """An attempt in flight that has been left, since a version was published that it does not draw from."""
    attempt = await dispatches.dispatcher.dispatch(run.sample(), 2)
    assert attempt is not None
    await dispatches.publish(run)
    assert attempt in await dispatches.swap.find_outdated()
    attempt.move(AttemptState.LEFT)
    return attempt


def gone_on(dispatches: Dispatches, left: Attempt) -> Attempt | None:
    """A new attempt takes the place of one that was left and is over."""
    assert left.newer is not None
    dispatches.attempts.end(left)
    return dispatches.swap.resume(left.operation, left.sequences, left.newer)


async def test_a_sample_goes_on_with_a_newer_version_without_leaving_flight(dispatches: Dispatches) -> None:
    """No gate is asked again, and whoever closes one finds it. The neighbour's sample is not told of anything."""
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    neighbour = await dispatcher.dispatch(dog.sample(), 1)
    old = cat.version
    left = await left_for_a_newer(dispatches, cat)
    with dispatches.notes() as notes:
        attempt = gone_on(dispatches, left)
        assert attempt is not None
        assert (await dispatches.in_flight(cat), await dispatches.in_flight(dog)) == (1, 1)
    assert notes == []
    assert (left.source.name, attempt.source.name, attempt.source.publication) == (old, cat.version, 1)
    assert set(dispatches.attempts) == {attempt, neighbour}
    assert sum({one.routed.name: one.routed.sequences for one in (attempt, neighbour) if one}.values()) == 3
    # There is nothing newer now.
    assert await dispatches.swap.find_outdated() == []
    assert await dispatches.versions(cat) == {left.routed.name: [old]}
    dispatches.rows.update_soon(attempt)
    await dispatches.settle()
    assert await dispatches.versions(cat) == {attempt.routed.name: [cat.version]}
    assert neighbour is not None
    assert await dispatches.versions(dog) == {neighbour.routed.name: [dog.version]}
    assert (await dispatches.in_flight(cat), await dispatches.in_flight(dog)) == (1, 1)


async def test_only_a_sample_that_was_left_goes_on_in_flight(dispatches: Dispatches) -> None:
    """Behind a failure its row is gone, and a gate's cut is to be looked at by a dispatch: a pause may be confirmed over both."""
    cat, dog = dispatches.cat, dispatches.dog
    left = await left_for_a_newer(dispatches, cat)
    neighbour = await dispatches.dispatcher.dispatch(dog.sample(), 1)
    assert neighbour is not None
    neighbour.move(AttemptState.CUT)
    await dispatches.publish(dog)
    assert neighbour in await dispatches.swap.find_outdated()
    assert left.resumes_on(None) is left.newer
    assert left.resumes_on(EngineFailure("the replica failed")) is None
    assert (neighbour.newer is None, neighbour.resumes_on(None)) == (False, None)
    # Both may still draw from what they have seen published.
    assert left.uses(cat.version)
    assert neighbour.uses(dog.version)
    assert not left.uses(dog.version)


async def test_a_sample_behind_a_gate_does_not_go_on_and_its_neighbours_does(dispatches: Dispatches) -> None:
    cat, dog = dispatches.cat, dispatches.dog
    left = [await left_for_a_newer(dispatches, run) for run in (cat, dog)]
    async with dispatches.database.write() as transaction:
        pause = Pause(GateMode.KEEP)
        await pause_gate(transaction, cat.run, tenant=cat.tenant, base_model=BASE, pause=pause, clock=utc_now)
    await dispatches.gate_cache.refresh()
    held, gone = (gone_on(dispatches, attempt) for attempt in left)
    assert held is None
    assert gone is not None
    assert set(dispatches.attempts) == {gone}


async def test_a_sample_that_is_over_is_not_noted_again(dispatches: Dispatches) -> None:
    """A note that comes behind the sample's end, or while its row is being deleted, brings nothing back and waits for nobody."""
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    neighbour = await dispatcher.dispatch(dog.sample(), 1)
    moved = [gone_on(dispatches, await left_for_a_newer(dispatches, cat)) for _ in range(2)]
    ending, ended = (attempt for attempt in moved if attempt is not None)
    await dispatches.rows.clear_one(ended.operation)
    for attempt in (ending, ended):
        dispatches.rows.update_soon(attempt)
    async with asyncio.timeout(SECONDS):
        if not dispatches.database.has_one_service:
            async with dispatches.database.write() as transaction:
                await clear_in_flight(transaction, [ending.operation.id], "here")
                # Behind the transaction it would wait for ever.
                await dispatches.settle()
        await dispatches.settle()
    is_left = dispatches.database.has_one_service
    assert (await dispatches.in_flight(cat), await dispatches.in_flight(dog)) == (int(is_left), 1)
    assert neighbour is not None
    assert await dispatches.versions(dog) == {neighbour.routed.name: [dog.version]}


async def test_a_sample_ahead_of_what_was_read_is_not_turned_back(dispatches: Dispatches) -> None:
    """A sample may begin on a version that was published after the look at what is followed."""
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher
    ahead, behind = [await dispatcher.dispatch(run.sample(), 1) for run in (cat, dog)]
    assert ahead is not None
    assert behind is not None
    for run in (cat, dog):
        await dispatches.publish(run)
    ahead.source = replace(ahead.source, publication=2)
    assert await dispatches.swap.find_outdated() == [behind]
    assert (ahead.newer, ahead.is_cut) == (None, False)


async def test_rounds_over_many_samplers_and_publications_do_not_wait_for_each_other_in_a_circle(
    dispatches: Dispatches,
) -> None:
    cat, dog, dispatcher = dispatches.cat, dispatches.dog, dispatches.dispatcher

    async def sample(run: LiveRun) -> None:
        for number in range(20):
            attempt = await dispatcher.dispatch(run.sample(run.samplers[number % 2]), 1)
            assert attempt is not None
            dispatches.attempts.end(attempt)

    async def publish() -> None:
        for number in range(20):
            await dispatches.publish((cat, dog)[number % 2])

    async with asyncio.timeout(3 * SECONDS):
        await asyncio.gather(*(sample(run) for run in (dog, cat, dog, cat)), publish())
    last = await dispatcher.dispatch(cat.sample(cat.samplers[1]), 1)
    assert last is not None
    assert last.source.name == cat.version
    assert set(dispatches.attempts) == {last}


async def test_gates_cut_an_attempt_once_as_the_strictest_mode_says_and_no_neighbours(dispatches: Dispatches) -> None:
    cat, dog = dispatches.cat, dispatches.dog
    running = [await dispatches.dispatcher.dispatch(cat.sample(), 1) for _ in range(2)]
    left = await left_for_a_newer(dispatches, cat)
    neighbour = await dispatches.dispatcher.dispatch(dog.sample(), 1)
    telemetry = Telemetry.of("test", utc_now)
    cuts = GateCuts(dispatches.gate_cache, dispatches.attempts, telemetry.sampling(BASE))
    seen: list[list[AttemptState]] = []
    for mode in (GateMode.WAIT, GateMode.KEEP, GateMode.KEEP, GateMode.ABORT, GateMode.KEEP):
        async with dispatches.database.write() as transaction:
            pause = Pause(mode)
            await pause_gate(transaction, cat.run, tenant=cat.tenant, base_model=BASE, pause=pause, clock=utc_now)
        await cuts.apply()
        seen.append([attempt.state for attempt in (*running, left, neighbour) if attempt is not None])
    undisturbed = [AttemptState.RUNNING] * 2 + [AttemptState.LEFT, AttemptState.RUNNING]
    cut = [AttemptState.CUT] * 2 + [AttemptState.LEFT, AttemptState.RUNNING]
    aborted = [AttemptState.ABORTED] * 3 + [AttemptState.RUNNING]
    assert seen == [undisturbed, cut, cut, aborted, aborted]
    assert telemetry.metrics.registry.get_sample_value("weft_samples_cut_total", {"base": BASE, "reason": "gate"}) == 2


class HeldCuts:
    """A replica that confirms no cut before ``go_on``."""

    def __init__(self, name: str, expected: int) -> None:
        self.name = name
        self.asked: list[str] = []
        self.confirmed: list[str] = []
        self.all_asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self._expected = expected

    async def cut(self, request_id: str, index: int | None = None) -> bool:
        self.asked.append(request_id)
        if len(self.asked) == self._expected:
            self.all_asked.set()
        await self.go_on.wait()
        self.confirmed.append(request_id)
        return True


async def test_a_pause_waits_for_no_cuts_of_another_tenants_nor_for_one_cut_after_the_other(
    dispatches: Dispatches,
) -> None:
    """The replica of one tenant's sample hangs; the other tenant's sample is on another replica."""
    cat, dog, router = dispatches.cat, dispatches.dog, dispatches.attempts._router
    held: dict[RunId, HeldCuts] = {}
    attempts: dict[RunId, Attempt] = {}
    for run, requests in ((cat, 3), (dog, 2)):
        attempt = await dispatches.dispatcher.dispatch(run.sample(), requests)
        assert attempt is not None
        router.drain(attempt.routed, is_draining=True)
        attempts[run.run], held[run.run] = attempt, HeldCuts(attempt.routed.name, requests)
        attempt.routed.replica = held[run.run]  # type: ignore[assignment]
        attempt.requests = [
            GenerateRequest(f"{run.run} {number}", np.array([1]), (None,), 4) for number in range(requests)
        ]
    assert attempts[cat.run].routed is not attempts[dog.run].routed
    cuts = GateCuts(dispatches.gate_cache, dispatches.attempts, Telemetry.of("test", utc_now).sampling(BASE))

    async def pause(run: LiveRun, mode: GateMode) -> None:
        async with dispatches.database.write() as transaction:
            await pause_gate(transaction, run.run, tenant=run.tenant, base_model=BASE, pause=Pause(mode), clock=utc_now)
        await cuts.apply()

    async with asyncio.timeout(SECONDS):
        await pause(cat, GateMode.KEEP)
        await held[cat.run].all_asked.wait()
        assert held[dog.run].asked == []
        await pause(dog, GateMode.KEEP)
        await held[dog.run].all_asked.wait()
        # A stricter pause is in order behind the first one, which is not confirmed yet.
        await pause(cat, GateMode.ABORT)
        assert (held[cat.run].confirmed, len(held[cat.run].asked)) == ([], 3)
        assert attempts[cat.run].state is AttemptState.ABORTED
        assert attempts[dog.run].state is AttemptState.CUT
        held[dog.run].go_on.set()
        await cuts.close()
    assert held[cat.run].confirmed == []


async def test_a_version_that_a_sample_draws_from_is_kept_without_a_wait_and_a_neighbours_is_unloaded(
    dispatches: Dispatches,
) -> None:
    cat, dog, attempts = dispatches.cat, dispatches.dog, dispatches.attempts
    attempt = await dispatches.dispatcher.dispatch(cat.sample(), 1)
    assert attempt is not None
    unload = partial(withdraw, attempts._router, attempts)
    with pytest.raises(EngineFailure, match="draw from it"):
        await asyncio.wait_for(unload(cat.version), SECONDS)
    await unload(dog.version)
    attempts.end(attempt)
    await unload(cat.version)
