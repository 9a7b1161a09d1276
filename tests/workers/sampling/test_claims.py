"""Claims of two sampling processes of one base: tenants take turns, and nobody takes what cannot run; both databases."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from errno import EIO
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import event, select, update
from sqlalchemy.engine import Connection

from contracts.base_model import read_base_model_facts
from contracts.errors import Unavailable
from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import NewOperation, OperationState, ReadyOperation
from contracts.operations import OperationKind, SampleRequest, SamplingParams
from contracts.sample_demand import demand_of
from contracts.service_class import FACTORS, ServiceClass
from contracts.turn_bounds import SAMPLE_QUANTUM
from engine.model.base import BaseModel
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.settings import VllmReplicaSettings
from ledger.runtime import Runtime
from ledger.wakeups import cleared_samples_topic
from store.clock import utc_now
from store.database import Database, create_engine
from store.database_clock import database_now
from store.tables import Operation, PoolState, ProcessKind, ReplicaCondition, SampleInFlight, WorkerProcess
from tenants.gates import GateMode, Pause, pause_gate, resume_gate
from tenants.limits import set_tenant
from tenants.tenant_names import create_tenant
from tenants.worker_standings import list_replicas
from tests.ledger_heads import pending_samples
from tests.payloads import digest, stored
from tests.workers.runtimes import make_runtime
from tests.workers.sampling.bare_samples import SECONDS, make_drawer, make_sampling
from workers.leases.pools import PoolHeartbeat
from workers.leases.processes import new_identity, remove_processes
from workers.sampling.claims import HeldBack, SampleClaims
from workers.sampling.gate_cache import GateCache
from workers.sampling.router import Router

BASE = "weft/tiny"
ROOM = 18
"""Samples that a process claims, two of them to spare."""
RUN = RunId("a run")


@dataclass
class Pool:
    """The claims of one sampling process."""

    router: Router
    gate_cache: GateCache
    claims: SampleClaims

    async def claim(self) -> list[ReadyOperation]:
        """Claim what the process may take now."""
        await self.gate_cache.refresh()
        found: list[ReadyOperation] = []
        is_more = True
        while is_more:
            some, is_more = await self.claims.claim()
            found += some
        return found


@dataclass
class Pools:
    """Two sampling processes, and tenants that send samples."""

    runtime: Runtime
    one: Pool
    two: Pool
    tenants: dict[str, TenantId] = field(default_factory=dict)
    sent: int = 0

    async def send(self, name: str, count: int, *, max_tokens: int = 8) -> None:
        """Accept samples of the tenant ``name``."""
        request = SampleRequest(np.array([1, 2]), 1, SamplingParams(max_tokens=max_tokens))
        async with self.runtime.database.write() as transaction:
            if name not in self.tenants:
                self.tenants[name] = await create_tenant(transaction, name=name, clock=utc_now)
            for _ in range(count):
                self.sent += 1
                new = NewOperation(
                    tenant=self.tenants[name],
                    lane=f"{name}:sample:0",
                    seq_id=self.sent,
                    kind=OperationKind.SAMPLE,
                    base_model=BASE,
                    payload=stored(request),
                    digest=digest(request),
                    demand=demand_of(request, 64),
                )
                await self.runtime.ledger.accept(transaction, new)

    async def waiting(self) -> list[ReadyOperation]:
        """Return the samples that no process has claimed."""
        async with self.runtime.database.read() as session:
            return await pending_samples(self.runtime.ledger, session, BASE)

    def counts(self, operations: list[ReadyOperation]) -> Counter[str]:
        """Return how many of ``operations`` each tenant has, by its name."""
        names = {tenant: name for name, tenant in self.tenants.items()}
        return Counter(names[operation.tenant] for operation in operations)

    async def pause(self) -> None:
        """Close the gate of the run."""
        async with self.runtime.database.write() as transaction:
            pause = Pause(GateMode.KEEP)
            await pause_gate(transaction, RUN, tenant=None, base_model=BASE, pause=pause, clock=utc_now)

    async def resume(self) -> None:
        """Open the gate of the run."""
        async with self.runtime.database.write() as transaction:
            await resume_gate(transaction, RUN, generation=None, clock=utc_now)


def make_pool(runtime: Runtime, model: Path, folder: Path) -> Pool:
    facts = replace(read_base_model_facts(BASE, model, None), context_length=64)
    settings = VllmReplicaSettings(
        name="a",
        base_url="http://127.0.0.1:9",
        served_model=BASE,
        base=facts,
        zero_adapter=folder / "zero",
        max_lora_rank=8,
        max_loras=4,
        max_resident=4,
    )
    router, gate_cache = Router([VllmReplica(settings)]), GateCache(runtime, BASE)
    heartbeat = PoolHeartbeat(new_identity(ProcessKind.POOL, BASE), runtime)
    return Pool(router, gate_cache, SampleClaims(runtime, heartbeat, router, gate_cache))


@pytest.fixture
async def pools(database_url: str, tiny_model_dir: Path, tmp_path: Path) -> AsyncIterator[Pools]:
    database = Database(create_engine(database_url))
    runtime = make_runtime(database, tmp_path, utc_now)
    runtime = replace(
        runtime,
        settings=runtime.settings.model_copy(update={"pool_samples": ROOM, "pool_wait": timedelta(microseconds=1)}),
    )
    one, two = (make_pool(runtime, tiny_model_dir, tmp_path) for _ in range(2))
    for pool in (one, two):
        await pool.claims.heartbeat.look()
    yield Pools(runtime, one, two)
    await database.close()


async def test_a_flood_stands_before_nobody_and_leaves_room_for_who_comes(pools: Pools) -> None:
    await pools.send("flood", 100)
    await pools.send("early", 3)
    first = pools.counts(await pools.one.claim())
    assert first["early"] == 3
    await pools.send("late", 1)
    assert pools.counts(await pools.one.claim()) == {"late": 1}
    assert first["flood"] + 4 <= ROOM


async def test_commits_that_fail_take_no_room(pools: Pools) -> None:
    """Otherwise a few outages of the database would leave a process without room for ever."""
    await pools.send("cats", 2 * ROOM)
    await pools.send("dogs", 2)

    def fail(_connection: Connection) -> None:
        raise Unavailable("the database went away")

    engine = pools.runtime.database.engine.sync_engine
    event.listen(engine, "commit", fail)
    try:
        for _ in range(3):
            with pytest.raises(Unavailable):
                await pools.one.claim()
    finally:
        event.remove(engine, "commit", fail)
    claimed = pools.counts(await pools.one.claim())
    assert claimed["dogs"] == 2
    assert claimed.total() > ROOM // 2


async def test_tenants_get_turns_by_tokens_and_not_by_samples(pools: Pools) -> None:
    await pools.send("long", 60, max_tokens=4000)
    await pools.send("short", 60, max_tokens=400)
    taken: Counter[str] = Counter()
    while taken.total() < 50:
        claimed = await pools.one.claim()
        taken += pools.counts(claimed)
        for operation in claimed:
            pools.one.claims.ended(operation, tokens=4002 if "long" in operation.lane else 402)
    assert taken["short"] > 4 * taken["long"]


async def test_a_batch_tenants_samples_go_on_beside_interactive_ones_by_their_classes(pools: Pools) -> None:
    """A class set by command is in force with the next claim. An equal tenant beside has what its share says."""
    for name in ("batch", "interactive"):
        await pools.send(name, 250, max_tokens=400)
    taken: Counter[str] = Counter()

    async def take(samples: int) -> Counter[str]:
        before = Counter(taken)
        while (taken - before).total() < samples:
            claimed = await pools.one.claim()
            taken.update(pools.counts(claimed))
            for operation in claimed:
                pools.one.claims.ended(operation, tokens=402)
        return taken - before

    equal = await take(60)
    assert 0.6 < equal["batch"] / equal["interactive"] < 1.6
    async with pools.runtime.database.write() as transaction:
        for name in ServiceClass.BATCH, ServiceClass.INTERACTIVE:
            await set_tenant(transaction, name=name, limits={}, service_class=name)
    apart = await take(170)
    longest, weights = 402, (FACTORS[ServiceClass.BATCH], FACTORS[ServiceClass.INTERACTIVE])
    bound = 3 * SAMPLE_QUANTUM + sum(longest / weight for weight in weights)
    served = [402 * apart[name] / weight for name, weight in zip(("batch", "interactive"), weights, strict=True)]
    assert abs(served[0] - served[1]) < bound + 3 * SAMPLE_QUANTUM
    assert 3 <= apart["batch"] <= apart["interactive"] / 4


async def test_a_paused_adapters_samples_take_no_room_and_come_back_once_it_is_open(pools: Pools) -> None:
    await pools.send("paused", 3 * ROOM)
    await pools.pause()
    for operation in await pools.one.claim():
        await pools.one.claims.give_back(operation, RUN)
        pools.one.claims.ended(operation, tokens=0)
    # The gate is known now: the others are held without being claimed.
    assert await pools.one.claim() == []
    await pools.send("neighbour", 2)
    assert pools.counts(await pools.one.claim()) == {"neighbour": 2}
    assert await pools.two.claim() == []
    await pools.resume()
    await pools.two.claims.release_open()
    assert pools.counts(await pools.two.claim())["paused"] >= ROOM - 2


async def test_samples_take_room_after_a_wait_as_they_do_when_claimed(pools: Pools) -> None:
    """A flood fills the room, waits at closed gates, and fills it again; then all its gates open. A neighbour has room."""
    claims, gone_on, given_back = pools.one.claims, [], []
    await pools.send("flood", 4 * ROOM)
    waits = []
    for _ in range(4):
        for operation in await pools.one.claim():
            wait = claims.waiting(operation)
            wait.__enter__()
            waits.append((operation, wait))
    assert not claims.may_wait
    for operation, wait in waits:
        try:
            wait.__exit__(None, None, None)
            gone_on.append(operation)
        except HeldBack as held:
            await claims.give_back(operation, held.gate)
            claims.ended(operation, tokens=0)
            given_back.append(operation.id)
    assert 0 < len(gone_on) < ROOM
    await pools.send("neighbour", 1)
    assert pools.counts(await pools.one.claim()) == {"neighbour": 1}
    assert {one.id for one in await pools.two.claim()} <= set(given_back)
    for operation in gone_on:
        claims.ended(operation, tokens=0)
    assert claims.may_wait
    assert pools.counts(await pools.one.claim())["flood"] == len(gone_on)


async def test_a_sweep_clears_the_rows_of_this_processs_ended_samples(pools: Pools) -> None:
    if pools.runtime.database.has_one_service:
        pytest.skip("a commit to SQLite has failed or has not")
    await pools.send("cats", 2)
    await pools.send("dogs", 1)
    claimed = await pools.one.claim()
    ended = next(one for one in claimed if one.tenant == pools.tenants["cats"])
    here, other = (pool.claims.heartbeat.identity.id for pool in (pools.one, pools.two))
    async with pools.runtime.database.write() as transaction:
        await transaction.execute(update(Operation).where(Operation.id == ended.id).values(state=OperationState.FAILED))
        for id, process in (*((one.id, here) for one in claimed), ("another's", other)):
            row = {"tenant_id": ended.tenant, "base_model": BASE, "replica": "a", "since": utc_now()}
            transaction.add(SampleInFlight(operation_id=id, process=process, **row))
    with pools.runtime.wakeups.listen(cleared_samples_topic(BASE)) as cleared:
        await pools.one.claims.sweep([one.id for one in claimed])
        await asyncio.wait_for(cleared.wait(), SECONDS)
    async with pools.runtime.database.read() as session:
        left = set(await session.scalars(select(SampleInFlight.operation_id)))
    assert left == {one.id for one in claimed} - {ended.id} | {"another's"}


async def test_an_open_gate_is_found_behind_very_many_that_stay_closed(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant's paused adapters, more than one look reads at a time, come before another's gate, which is open."""
    closed, count = "a-closed-", 600
    await pools.send("paused", count)
    await pools.send("neighbour", 1)
    async with pools.runtime.database.write() as transaction:
        held = await transaction.execute(select(Operation.id, Operation.tenant_id).order_by(Operation.seq_id))
        for number, (id, tenant) in enumerate(held.all()):
            gate = "b-open" if tenant == pools.tenants["neighbour"] else f"{closed}{number:04}"
            await transaction.execute(update(Operation).where(Operation.id == id).values(held_by=gate))
    monkeypatch.setattr(GateCache, "is_closed", lambda _, gate: gate.startswith(closed))
    await pools.two.claims.release_open()
    assert pools.counts(await pools.two.claim()) == {"neighbour": 1}


async def test_a_sample_held_by_a_gate_that_has_just_opened_is_not_forgotten(pools: Pools) -> None:
    await pools.send("paused", 1)
    (operation,) = await pools.one.claim()
    await pools.one.claims.give_back(operation, RUN)
    pools.one.claims.ended(operation, tokens=0)
    assert [one.id for one in await pools.two.claim()] == [operation.id]


async def test_a_process_without_a_replica_leaves_the_samples_to_one_that_has_some(pools: Pools) -> None:
    await pools.send("cats", 3)
    mine = await pools.one.claim()
    (replica,) = pools.one.router.replicas
    pools.one.router.mark(replica, is_alive=False)
    assert pools.one.claims.state is PoolState.NO_REPLICA
    for operation in mine:
        await pools.one.claims.give_back(operation, None)
        pools.one.claims.ended(operation, tokens=0)
    assert await pools.one.claim() == []
    assert {one.id for one in await pools.two.claim()} == {RequestId(one.id) for one in mine}
    await pools.send("cats", 1)
    pools.one.router.mark(replica, is_alive=True)
    pools.one.router.drain(replica, is_draining=True)
    assert pools.one.claims.state is PoolState.DRAINED
    assert await pools.one.claim() == []
    pools.one.router.drain(replica, is_draining=False)
    assert len(await pools.one.claim()) == 1


async def test_samples_fail_after_the_stated_time_only_if_no_process_has_a_replica(pools: Pools) -> None:
    """Both processes lose their replica. The first to be without one for so long leaves the samples to the other."""
    await pools.send("cats", 2)
    one, two = pools.one.router.replicas[0], pools.two.router.replicas[0]
    pools.one.router.mark(one, is_alive=False)
    assert await pools.one.claims.tell_state()
    assert len(await pools.waiting()) == 2
    pools.two.router.mark(two, is_alive=False)
    await pools.two.claims.tell_state()
    await pools.two.claims.tell_state()
    assert await pools.waiting() == []


async def test_replicas_are_told_when_they_change_and_again_by_a_process_that_was_reaped(pools: Pools) -> None:
    async def told() -> list[tuple[str | None, ReplicaCondition | None, bool]]:
        async with pools.runtime.database.read() as session:
            found = await list_replicas(session, BASE, await database_now(session, pools.runtime.clock))
        return [(one.process, one.condition, one.is_alive) for one in found]

    claims, router = pools.one.claims, pools.one.router
    (routed,), process = router.replicas, pools.one.claims.heartbeat.identity.id
    await claims.tell_state()
    assert await told() == [(process, ReplicaCondition.WORKS, True)]
    router.mark(routed, is_alive=False)
    assert await claims.tell_state()
    assert await told() == [(process, ReplicaCondition.DOWN, True)]
    router.mark(routed, is_alive=True)
    router.drain(routed, is_draining=True)
    await claims.tell_state()
    assert await told() == [(process, ReplicaCondition.DRAINING, True)]
    router.note_refusal(routed, cannot_sleep=True)
    await claims.tell_state()
    assert await told() == [(process, ReplicaCondition.CANNOT_SLEEP, True)]
    router.note_refusal(routed, cannot_sleep=False)
    await claims.tell_state()
    async with pools.runtime.database.write() as transaction:
        await transaction.execute(update(WorkerProcess).values(expires_at=datetime(2000, 1, 1, tzinfo=UTC)))
    assert await told() == [(process, ReplicaCondition.DRAINING, False)]
    async with pools.runtime.database.write() as transaction:
        await remove_processes(transaction, [process])
    claims.heartbeat._heartbeat._renewed = claims.heartbeat._heartbeat._unbroken_since = float("-inf")
    await claims.heartbeat.look()
    assert await told() == []
    await claims.tell_state()
    assert await told() == [(process, ReplicaCondition.DRAINING, True)]


@pytest.mark.parametrize("for_good", [False, True])
async def test_a_sample_whose_payload_could_not_be_read_is_drawn_once_it_can_be_or_ends(
    database_url: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    """The disk fails for one read of one tenant's file, or for all of them. The neighbour's sample is drawn."""
    monkeypatch.setattr("workers.sampling.worker.SWEEP_SECONDS", 0.2)
    monkeypatch.setattr("store.unread_files.LONGEST_SECONDS", 0.5)
    # Every payload has a file.
    monkeypatch.setattr("ledger.payload_files._INLINE_TOKENS", 0)
    monkeypatch.setattr("ledger.payload_files.LARGEST_IN_ROW", 0)
    database = Database(create_engine(database_url))
    runtime = make_runtime(database, tmp_path, utc_now)
    unlucky, beside = await make_drawer(runtime), await make_drawer(runtime)
    waits, read, failures = await unlucky.send(5, as_stored=True), Path.read_bytes, []

    def read_bytes(path: Path) -> bytes:
        if path.name == waits and (for_good or not failures):
            failures.append(path)
            raise OSError(EIO, "the disk fails")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    base = BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))
    sampling = make_sampling(runtime, base, tiny_model_dir)
    await sampling.pool.start()
    working = asyncio.create_task(sampling.worker.run())
    try:
        assert (await beside.result(await beside.send(6, as_stored=True))).sequences
        if for_good:
            status = await runtime.ledger.wait_until_final(unlucky.tenant, waits, seconds=SECONDS)
            assert (status.state, status.error_code) == (OperationState.FAILED, "unreadable_operation")
            assert (await unlucky.result(await unlucky.send(5, as_stored=True))).sequences
        else:
            assert (await unlucky.result(waits)).sequences
        assert (len(failures) > 1) is for_good
    finally:
        sampling.worker.stop()
        await working
        await sampling.pool.close()
        await database.close()
