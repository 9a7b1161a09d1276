"""Claims of one sampling process: which samples it takes next, the room that they fill, and what it gives back.

Tenants take turns by tokens (``engine.sampling.seats``). A process takes only what can run now: nothing while no replica
takes work or the base's gate is closed, and no sample that its adapter's closed gate holds. A sample that turns out not to
run is given back. Only one that has tokens waits here for its gate, and takes no room meanwhile. Without a replica, or without
room for it once the gate opens, that too is given back, with its tokens.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import EngineFailure, Unavailable
from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import ReadyOperation
from engine.round_robin import Fairness
from engine.sampling.seats import Seats, hand_out
from ledger.cancellation import OfOperation
from ledger.runtime import Runtime
from ledger.sample_claims import (
    MOST_TENANTS,
    Claim,
    WaitingSample,
    WaitingSamples,
    claim_samples,
    clear_ended_in_flight,
    gates_that_hold,
    give_back,
    hold_waiting,
    release_held,
    return_strays,
    waiting_samples,
)
from ledger.statements import MAX_READY
from ledger.wakeups import cleared_samples_topic, sampling_topic
from store.batcher import Batcher
from store.tables import PoolState, ReplicaCondition
from tenants.worker_standings import ToldReplica
from workers.leases.pools import PoolHeartbeat
from workers.leases.processes import some_pool_has_replicas
from workers.sampling.gate_cache import GateCache
from workers.sampling.router import RoutedReplica, Router

log = logging.getLogger(__name__)

_FAILED_OF_EACH = 16
_FEWEST_OF_EACH = 4
"""Fewest waiting samples of a tenant that are looked at."""

_AFTER_EXPIRY_SECONDS = 0.01


class HeldBack(Exception):
    """A sample cannot run here now. ``gate`` is the run whose closed gate holds it, if one does."""

    def __init__(self, gate: RunId | None = None) -> None:
        super().__init__()
        self.gate = gate


@dataclass(frozen=True, slots=True)
class _Return:
    """A sample to give back."""

    operation: ReadyOperation
    gate: RunId | None


@dataclass(frozen=True, slots=True)
class _Seat:
    """Room that a sample takes again, whose tokens were charged when it was claimed."""

    cost: int = 1


class SampleClaims:
    """Claims of one base model's samples by this process. Used from one event loop."""

    def __init__(self, runtime: Runtime, heartbeat: PoolHeartbeat, router: Router, gate_cache: GateCache) -> None:
        self.heartbeat = heartbeat
        self._runtime = runtime
        self._router = router
        self._gate_cache = gate_cache
        self._base_model = heartbeat.identity.base_model
        self._process = heartbeat.identity.id
        self._seats = Seats.within(runtime.settings.pool_samples)
        self._fairness = Fairness()
        self._held: Counter[str] = Counter()
        """Room that each tenant's samples fill."""
        self._costs: dict[Claim, int] = {}
        self._waiting: set[Claim] = set()
        """Samples that take no room, from when they begin to wait here until they go on or have ended.

        Told by their claims: a sample that is being given back may be claimed again before that is through.
        """
        self._unread: set[Claim] = set()
        """Samples that are claimed and whose payloads could not be read."""
        self._gate_of: dict[str, RunId] = {}
        """Gate that has held a sample of a lane, while it is closed."""
        self._after = ""
        """Tenant behind whom the next look begins, when there are more than one look can read."""
        self._round_claimed = 0
        """Samples claimed since the last look that began with the first tenant."""
        self._tenants = 1
        """Number of tenants that the last look found."""
        self._told: tuple[PoolState, list[ToldReplica], float] = (PoolState.WORKING, [], 0.0)
        self._answered_at = monotonic()
        """Monotonic seconds when a replica of this process was last known to answer."""
        self.left_some = False
        """True if the last call of ``claim`` left samples for want of room."""
        self.seconds_to_rate = inf
        """Seconds after the last call of ``claim`` when a sample that a rate holds may run."""
        self._returns: Batcher[_Return, None] = Batcher(self._return)

    async def claim(self) -> tuple[list[ReadyOperation], bool]:
        """Claim samples that may run now, and return them and whether another call may find more of them."""
        room = min(self._seats.total - self._held.total(), MAX_READY)
        self.left_some = room <= 0
        if room <= 0 or not self._may_work():
            return [], False
        each = min(room, max(_FEWEST_OF_EACH, 2 * room // self._tenants))
        async with self._runtime.database.read() as session:
            found = await waiting_samples(
                session, self._base_model, of_each=each, now=self._runtime.clock(), after_tenant=self._after
            )
        waiting = found.of
        began_late = bool(self._after)
        is_cut = len(waiting) >= MOST_TENANTS
        self._tenants = max(1, len(waiting))
        self._after = max(waiting) if is_cut else ""
        waiting, has_held = await self._hold(self._within_rates(found))
        chosen = self._choose(waiting, room)
        claimed = await self._claim(chosen)
        counts: Counter[str] = Counter(sample.tenant for sample in chosen)
        self.left_some = any(counts[tenant] < len(samples) for tenant, samples in waiting.items())
        is_more = any(counts[tenant] == len(samples) == each for tenant, samples in waiting.items())
        self._round_claimed += len(claimed)
        so_far = self._round_claimed
        if not is_cut:
            self._round_claimed = 0
        # A round over more tenants than one look can read ends when it has claimed nothing.
        is_more = is_more or has_held or is_cut or (began_late and so_far > 0)
        return claimed, is_more or len(claimed) < len(chosen)

    async def _hold(self, waiting: dict[str, list[WaitingSample]]) -> tuple[dict[str, list[WaitingSample]], bool]:
        """Let known closed gates hold the samples behind them, unclaimed. Return the others, and whether any were held."""
        self._gate_of = {lane: gate for lane, gate in self._gate_of.items() if self._gate_cache.is_closed(gate)}
        behind: dict[RunId, list[RequestId]] = {}
        others: dict[str, list[WaitingSample]] = {}
        for tenant, samples in waiting.items():
            for sample in samples:
                gate = self._gate_of.get(sample.lane) if sample.is_fresh else None
                if gate is None:
                    others.setdefault(tenant, []).append(sample)
                else:
                    behind.setdefault(gate, []).append(sample.id)
        if behind:
            async with self._runtime.database.write() as transaction:
                for gate, ids in sorted(behind.items()):
                    await hold_waiting(transaction, ids, gate)
            await self.release_open()
        return others, bool(behind)

    def _within_rates(self, waiting: WaitingSamples) -> dict[str, list[WaitingSample]]:
        """Return the samples that their rates let run now, and note when the next one may."""
        held = [sample.seconds for samples in waiting.of.values() for sample in samples if sample.seconds]
        self.seconds_to_rate = min([waiting.seconds_to_lines, *held])
        free = {tenant: [one for one in samples if not one.seconds] for tenant, samples in waiting.of.items()}
        return {tenant: samples for tenant, samples in free.items() if samples}

    def _choose(self, waiting: dict[str, list[WaitingSample]], room: int) -> list[WaitingSample]:
        left = room

        def fits(_: WaitingSample) -> bool:
            nonlocal left
            left -= 1
            return left >= 0

        shares = {tenant: samples[0].share for tenant, samples in waiting.items()}
        chosen, self._fairness = hand_out(
            waiting, self._held, self._fairness, seats=self._seats, shares=shares, fits=fits
        )
        return chosen

    async def _claim(self, chosen: Sequence[WaitingSample]) -> list[ReadyOperation]:
        if not chosen:
            return []
        claimed: list[ReadyOperation] = []
        try:
            async with self._runtime.database.write() as transaction:
                claims = await claim_samples(transaction, [one.id for one in chosen], process=self._process)
                loaded = await self._runtime.ledger.load(transaction, [one for one, _ in claims]) if claims else []
            # Only what is committed takes room: nobody would free the room of the others.
            claimed = loaded
            self._unread |= set(claims) - {_claim_of(operation) for operation in loaded}
        finally:
            mine = {operation.id: _claim_of(operation) for operation in claimed}
            for sample in chosen:
                if sample.id in mine:
                    self._held[sample.tenant] += 1
                    self._costs[mine[sample.id]] = sample.cost
                else:
                    # Another process was first, or the database went away.
                    self._fairness = self._fairness.credit(sample.tenant, sample.cost)
        return claimed

    def ended(self, operation: ReadyOperation, *, tokens: int) -> None:
        """Free the room of a sample that has ended or was given back; ``tokens`` are those that it took."""
        claim = _claim_of(operation)
        if claim in self._waiting:
            self._waiting.remove(claim)
        else:
            self._free(operation.tenant)
        cost = self._costs.pop(claim, 0)
        self._fairness = self._fairness.credit(operation.tenant, cost - tokens)

    def claimed_twice(self, operation: ReadyOperation) -> None:
        """Free the room that a second claim of a sample takes, which this process works on."""
        self._free(operation.tenant)
        self._fairness = self._fairness.credit(operation.tenant, self._costs.pop(_claim_of(operation), 0))

    @property
    def may_wait(self) -> bool:
        """True if a sample may wait here: the memory of those that do is bounded."""
        return len(self._waiting) < self._seats.total

    @contextmanager
    def waiting(self, operation: ReadyOperation) -> Iterator[None]:
        """Free the room of a sample inside the block, in which it waits for its gate. It takes room again as a claim does.

        Raises ``HeldBack`` after the block if its tenant may have no more room: the sample waits in the ledger for its turn.
        """
        self._free(operation.tenant)
        self._waiting.add(_claim_of(operation))
        try:
            yield
        except Unavailable as outage:
            # Repeated from the beginning, the sample would be drawn without room.
            raise HeldBack from outage
        tenant: str = operation.tenant
        shares = {tenant: operation.share}
        given, _ = hand_out({tenant: [_Seat()]}, self._held, Fairness(), seats=self._seats, shares=shares)
        if not given:
            raise HeldBack
        self._waiting.remove(_claim_of(operation))
        self._held[operation.tenant] += 1

    async def give_back(self, operation: ReadyOperation, gate: RunId | None) -> None:
        """Return a claimed sample to the ledger, held by ``gate`` if that is given. Samples of one moment share a transaction.

        After ``Unavailable`` the call may be repeated: it returns nothing that has been claimed anew.
        """
        await self._returns.ask(_Return(operation, gate))

    async def _return(self, returns: Sequence[_Return]) -> list[None]:
        gates: dict[RunId | None, list[Claim]] = {}
        for one in returns:
            gates.setdefault(one.gate, []).append(_claim_of(one.operation))
            if one.gate is not None:
                self._gate_of[one.operation.lane] = one.gate
        async with self._runtime.database.write() as transaction:
            for gate, claims in gates.items():
                await give_back(transaction, claims, process=self._process, gate=gate)
            if None in gates:
                self._announce(transaction)
        # A gate may have opened before its samples were held by it.
        if gates.keys() - {None}:
            try:
                await self.release_open()
            except Unavailable as outage:
                # The samples are given back all the same. The next look at the gates releases them.
                log.warning("%s", outage.message)
        return [None] * len(returns)

    async def release_open(self) -> None:
        """Let samples be claimed whose gate has opened. Called whenever gates may have changed, after the cache is refreshed."""
        async with self._runtime.database.read() as session:
            holding = await gates_that_hold(session, self._base_model)
        if not holding:
            return
        await self._gate_cache.refresh()
        open_ones = [gate for gate in holding if not self._gate_cache.is_closed(gate)]
        if open_ones:
            async with self._runtime.database.write() as transaction:
                await release_held(transaction, self._base_model, open_ones)
                self._announce(transaction)

    def next_expiry(self) -> float:
        """Return the seconds until the next closed gate expires, infinity when none does."""
        left = self._gate_cache.next_expiry()
        return float("inf") if left is None else left + _AFTER_EXPIRY_SECONDS

    async def sweep(self, known: Collection[str]) -> None:
        """Return the samples that the ledger says this process has claimed, except ``known``. Clear rows of ended ones.

        - Claims that were committed although the process saw the transaction fail, as when the database goes away during the
          commit.
        - In-flight rows that were committed although the process saw the transaction fail, of samples that have ended since:
          pauses would wait for them.
        - Samples whose payloads could not be read. They rest till here: claimed again at once, they would fail again.
        """
        unread = sorted(self._unread)
        if not self._runtime.database.has_one_service:
            async with self._runtime.database.write() as transaction:
                await return_strays(transaction, process=self._process, but=known)
            async with self._runtime.database.write() as transaction:
                if await clear_ended_in_flight(transaction, process=self._process):
                    topic = cleared_samples_topic(self._base_model)
                    self._runtime.wakeups.announce_after_commit(transaction, topic)
        elif unread:
            # A commit to SQLite has failed or has not: nothing else strays.
            async with self._runtime.database.write() as transaction:
                await give_back(transaction, unread, process=self._process)
        self._unread.difference_update(unread)

    async def tell_state(self) -> bool:
        """Record whether this process takes samples, and its replicas, if that has changed.

        Return whether it takes samples now and did not before, or the reverse.
        """
        state = self.state
        if state is not PoolState.NO_REPLICA:
            self._answered_at = monotonic()
        elif monotonic() - self._answered_at > self._runtime.settings.pool_wait.total_seconds():
            await self._fail_forsaken()
        replicas, held_since = [_told(routed) for routed in self._router.replicas], self.heartbeat.held_since
        before, now = self._told, (state, replicas, held_since)
        if now == before or not await self.heartbeat.tell(state, replicas):
            return False
        self._told = now
        return state is not before[0]

    async def _fail_forsaken(self) -> None:
        """Fail the samples that have waited for ``pool_wait``, if no other process of the base has a replica either."""
        settings, clock = self._runtime.settings, self._runtime.clock
        async with self._runtime.database.write() as transaction:
            if await some_pool_has_replicas(transaction, self._base_model, clock):
                return
            now = clock()
            waiting = (await waiting_samples(transaction, self._base_model, of_each=_FAILED_OF_EACH, now=now)).of
            latest = now - settings.pool_wait
            old = [one.id for some in waiting.values() for one in some if one.accepted_at <= latest]
            failure = EngineFailure(
                f"no replica of {self._base_model} has answered for {settings.pool_wait.total_seconds():.0f} s; try again later"
            )
            for operation in old:
                await self._runtime.ledger.cancel(transaction, OfOperation(operation), failure, only_samples=True)

    async def watch_replicas(self, changed: asyncio.Event) -> None:
        """Set ``changed`` whenever replicas may have changed, until cancelled."""
        while True:
            await self._router.wait_for_change()
            changed.set()

    async def settle(self) -> None:
        """Wait until nothing is being given back."""
        await self._returns.settle()

    @property
    def state(self) -> PoolState:
        """State of this process, by its replicas."""
        if self._router.takes_work:
            return PoolState.WORKING
        works = any(routed.works for routed in self._router.replicas)
        return PoolState.DRAINED if works else PoolState.NO_REPLICA

    def _free(self, tenant: TenantId) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]

    def _may_work(self) -> bool:
        return self.state is PoolState.WORKING and not self._gate_cache.closed_before(None)

    def _announce(self, transaction: AsyncSession) -> None:
        self._runtime.wakeups.announce_after_commit(transaction, sampling_topic(self._base_model))


def _claim_of(operation: ReadyOperation) -> Claim:
    return operation.id, operation.claim


def _told(routed: RoutedReplica) -> ToldReplica:
    if not routed.works:
        condition = ReplicaCondition.DOWN
    elif routed.is_asleep:
        condition = ReplicaCondition.ASLEEP
    elif routed.cannot_sleep:
        condition = ReplicaCondition.CANNOT_SLEEP
    else:
        condition = ReplicaCondition.DRAINING if routed.is_draining else ReplicaCondition.WORKS
    return ToldReplica(routed.name, condition, len(routed.adapters))
