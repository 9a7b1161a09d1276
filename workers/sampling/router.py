"""Routing of samples to replicas: a session or a trajectory keeps its replica unless that one is overloaded or away.

Load is counted in the sequences that this process has on a replica. A session stays on one replica, because the replica's
prefix cache has the session's prompts. A bound on the load moves some samples to other replicas. Method: Mirrokni, Thorup
and Zadimoghaddam 2018, "Consistent Hashing with Bounded Loads". The replica is the one with the highest hash for the key
("rendezvous hashing", Thaler and Ravishankar 1998), so nothing is remembered, and each key has an order of replicas to fall
back on.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from contracts.ids import RunId
from contracts.ledger_records import ReadyOperation
from contracts.operations import SampleRequest
from engine.sampling.replica import ReplicaHealth, SamplerReplica

LOAD_FACTOR = 1.25
"""Bound of a replica's load, as a multiple of the mean load. Above it a session's samples go to another replica."""
HOME_SEQUENCES = 8
"""Load up to which a replica takes the turns of its trajectories, whatever the mean load is: so few share a step cheaply."""
DOUBTFUL_FAILURES = 4
"""Failures in a row after which a replica is doubtful. It stays in use till it draws no probe: one tenant may cause them all."""
_REMEMBERED_ADAPTERS = 256


@dataclass(frozen=True, slots=True)
class Affinity:
    """Key whose samples should draw on one replica."""

    key: str
    is_trajectory: bool = False
    """True: the client names a conversation. The prompt's prefix is where the turns before were drawn, so the replica is
    chosen before one that has the adapter: loading an adapter takes less than computing a conversation."""


def affinity_of(operation: ReadyOperation) -> Affinity:
    """Return the affinity of a sample: its trajectory's within its tenant, or else its sampling session's."""
    sample = operation.payload
    if isinstance(sample, SampleRequest) and sample.trajectory is not None:
        # Neither a tenant nor a sampler has an id with NUL: no tenant's trajectory has another one's key.
        return Affinity(f"{operation.tenant}\0{sample.trajectory}", is_trajectory=True)
    return Affinity(operation.lane)


@dataclass(slots=True, eq=False)
class RoutedReplica:
    """A replica and the router's knowledge of it."""

    replica: SamplerReplica
    sequences: int = 0
    """Sequences that this process has on the replica now."""
    is_alive: bool = True
    is_failing: bool = False
    """True while the replica answers and draws nothing. It takes no work until it has drawn a token."""
    failures: int = 0
    """Attempts of any samples in a row that have failed there without a token."""
    is_draining: bool = False
    is_asleep: bool | None = False
    """None: unknown, because the replica has not answered a directive or its server was away."""
    cannot_sleep: bool = False
    """True once the replica has refused to sleep, until it is no longer told to, or starts anew."""
    adapters: OrderedDict[str, RunId | None] = field(default_factory=OrderedDict)
    """Run of each version that was lately asked for on the replica, the least recently used version first.

    Says where samples go. It does not say what is loaded: it is bounded, and cleared when the replica answers again.
    """

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self.replica.name

    @property
    def takes_work(self) -> bool:
        """True if new samples may go to the replica."""
        return self.works and not self.is_draining

    @property
    def works(self) -> bool:
        """True if the replica answers and is not known to draw nothing."""
        return self.is_alive and not self.is_failing

    @property
    def is_doubtful(self) -> bool:
        """True if the replica should be seen to draw a token."""
        return self.is_failing or self.failures >= DOUBTFUL_FAILURES

    def note(self, adapter: str | None, run: RunId | None) -> None:
        """Remember ``adapter``, a version of ``run``, as the latest that was asked for on the replica; None does nothing."""
        if adapter is not None:
            self.adapters[adapter] = run
            self.adapters.move_to_end(adapter)
            if len(self.adapters) > _REMEMBERED_ADAPTERS:
                self.adapters.popitem(last=False)


class Router:
    """The replicas of one base model. Used from one event loop."""

    def __init__(self, replicas: Sequence[SamplerReplica] = ()) -> None:
        self.replicas = [RoutedReplica(replica) for replica in replicas]
        self._changed = asyncio.Event()

    def put(self, replica: SamplerReplica, *, is_draining: bool = False) -> None:
        """Add ``replica``, or replace the one of its name. With ``is_draining`` it takes no samples yet."""
        routed = self.find(replica.name)
        if routed is None:
            routed = RoutedReplica(replica)
            self.replicas.append(routed)
        routed.replica = replica
        routed.is_asleep = routed.cannot_sleep = False
        routed.is_draining = is_draining
        routed.adapters.clear()
        self.note_drawing(routed, is_failing=False)
        self.mark(routed, is_alive=True)

    def find(self, name: str) -> RoutedReplica | None:
        """Return the replica called ``name``."""
        return next((routed for routed in self.replicas if routed.name == name), None)

    def choose(self, affinity: Affinity, adapter: str | None, failed_on: Sequence[str] = ()) -> RoutedReplica | None:
        """Return a replica for the next sample of ``affinity``, whose key is any text, "" and "0" too.

        ``failed_on``: replicas on which the sample's last attempts failed, the last one last. The others come before them.
        Return None when no replica takes work.
        """
        open_ones = [routed for routed in self.replicas if routed.takes_work]
        if not open_ones:
            return None
        places = {name: place for place, name in enumerate(failed_on)}
        first = min(places.get(routed.name, -1) for routed in open_ones)
        return _best([routed for routed in open_ones if places.get(routed.name, -1) == first], affinity, adapter)

    @property
    def takes_work(self) -> bool:
        """True if new samples may go to some replica."""
        return any(routed.takes_work for routed in self.replicas)

    async def wait_for_change(self) -> None:
        """Wait until any replica is added, checked, drained or undrained."""
        await self._changed.wait()

    def hold(self, routed: RoutedReplica, adapter: str | None, run: RunId | None, sequences: int) -> None:
        """Add ``sequences`` of ``adapter`` to the replica's load until ``release``."""
        routed.sequences += sequences
        routed.note(adapter, run)

    def release(self, routed: RoutedReplica, sequences: int) -> None:
        """Take ``sequences`` that have ended off the replica's load."""
        routed.sequences -= sequences

    async def check(self, routed: RoutedReplica) -> ReplicaHealth:
        """Ask for the replica's health, mark it and return its health."""
        health = await routed.replica.health()
        self.mark(routed, is_alive=health.alive)
        if health.hangs:
            self.note_drawing(routed, is_failing=True)
        return health

    def mark(self, routed: RoutedReplica, *, is_alive: bool) -> None:
        """Record whether the replica answers. Forget the adapters of one that comes back, since it may have restarted."""
        if is_alive and not routed.is_alive:
            routed.adapters.clear()
            routed.is_asleep = None if routed.is_asleep else routed.is_asleep
        routed.is_alive = is_alive
        self._announce()

    def note_drawing(self, routed: RoutedReplica, *, is_failing: bool) -> None:
        """Record whether the replica has drawn a token or should have."""
        if not is_failing:
            routed.failures = 0
        if routed.is_failing != is_failing:
            routed.is_failing = is_failing
            self._announce()

    def drain(self, routed: RoutedReplica, *, is_draining: bool) -> None:
        """Stop giving the replica new samples, or start again."""
        if routed.is_draining != is_draining:
            routed.is_draining = is_draining
            self._announce()

    def note_refusal(self, routed: RoutedReplica, *, cannot_sleep: bool) -> None:
        """Record whether the replica refuses the sleep that it is told."""
        if routed.cannot_sleep != cannot_sleep:
            routed.cannot_sleep = cannot_sleep
            self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _best(replicas: Sequence[RoutedReplica], affinity: Affinity, adapter: str | None) -> RoutedReplica:
    total = sum(routed.sequences for routed in replicas) + 1
    bound = math.ceil(LOAD_FACTOR * total / len(replicas))
    if affinity.is_trajectory:
        bound = max(bound, HOME_SEQUENCES)
    fitting = [routed for routed in replicas if routed.sequences < bound] or list(replicas)
    ranked = sorted(fitting, key=lambda routed: _weight(affinity.key, routed.name), reverse=True)
    if adapter is not None and adapter not in ranked[0].adapters and not affinity.is_trajectory:
        holders = [routed for routed in ranked if adapter in routed.adapters]
        if holders:
            return holders[0]
    return ranked[0]


def _weight(key: str, replica: str) -> bytes:
    return blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest()
