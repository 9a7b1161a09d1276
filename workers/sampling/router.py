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
from engine.sampling.replica import SamplerReplica

LOAD_FACTOR = 1.25
"""Bound of a replica's load, as a multiple of the mean load. Above it a session's samples go to another replica."""
HOME_SEQUENCES = 8
"""Load up to which a replica takes the turns of its trajectories, whatever the mean load is: so few share a step cheaply."""
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
    is_draining: bool = False
    is_asleep: bool | None = False
    """None: unknown, because the replica has not answered a directive or its server was away."""
    cannot_sleep: bool = False
    """True once the replica has refused to sleep, until it is no longer told to, or starts anew."""
    adapters: OrderedDict[str, RunId | None] = field(default_factory=OrderedDict)
    """Run of each version that was asked for on the replica, the least recently used version first."""

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self.replica.name

    @property
    def takes_work(self) -> bool:
        """True if new samples may go to the replica."""
        return self.is_alive and not self.is_draining

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
        self.mark(routed, is_alive=True)

    def find(self, name: str) -> RoutedReplica | None:
        """Return the replica called ``name``."""
        return next((routed for routed in self.replicas if routed.name == name), None)

    def choose(self, affinity: Affinity, adapter: str | None) -> RoutedReplica | None:
        """Return a replica for the next sample of ``affinity``, whose key is any text, "" and "0" too.

        Return None when no replica takes work.
        """
        open_ones = [routed for routed in self.replicas if routed.takes_work]
        return _best(open_ones, affinity, adapter) if open_ones else None

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

    async def check(self, routed: RoutedReplica) -> None:
        """Ask for the replica's health and mark it."""
        self.mark(routed, is_alive=(await routed.replica.health()).alive)

    def mark(self, routed: RoutedReplica, *, is_alive: bool) -> None:
        """Record whether the replica answers. Forget the adapters of one that comes back, since it may have restarted."""
        if is_alive and not routed.is_alive:
            routed.adapters.clear()
            routed.is_asleep = None if routed.is_asleep else routed.is_asleep
        routed.is_alive = is_alive
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
