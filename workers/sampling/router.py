"""Which replica a sample goes to: the session's own while it is not overloaded, else one that has the adapter.

Load is counted in sequences that this process has sent. Consistent hashing with bounded loads (Mirrokni, Thorup and
Zadimoghaddam 2018) keeps a session on one replica, whose prefix cache knows it, without piling work on it.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from time import monotonic

from contracts.errors import EngineFailure
from contracts.ids import RunId
from engine.sampling.replica import SamplerReplica

LOAD_FACTOR = 1.25
"""How far above the mean a replica's load may go before a session's samples go elsewhere."""
_REMEMBERED_ADAPTERS = 256


@dataclass(slots=True, eq=False)
class RoutedReplica:
    """A replica and what the router knows of it. ``sequences`` are those that this process has there now."""

    replica: SamplerReplica
    sequences: int = 0
    is_alive: bool = True
    is_draining: bool = False
    is_asleep: bool | None = False
    """None: unknown, as an order's answer was lost or the server was away."""
    adapters: OrderedDict[str, RunId | None] = field(default_factory=OrderedDict)
    """What was asked for there, least recently first: version and run."""

    @property
    def name(self) -> str:
        """The replica's."""
        return self.replica.name

    @property
    def takes_work(self) -> bool:
        """Whether new samples may go there."""
        return self.is_alive and not self.is_draining

    def note(self, adapter: str | None, run: RunId | None) -> None:
        """Remember that the adapter, a version of ``run``, was asked for there last."""
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
        """Send samples to ``replica`` from now on, in place of the one that had its name; not yet if ``is_draining``."""
        routed = self.find(replica.name)
        if routed is None:
            routed = RoutedReplica(replica)
            self.replicas.append(routed)
        routed.replica = replica
        routed.is_asleep = False
        routed.is_draining = is_draining
        routed.adapters.clear()
        self.mark(routed, is_alive=True)

    def find(self, name: str) -> RoutedReplica | None:
        """The replica called ``name``."""
        return next((routed for routed in self.replicas if routed.name == name), None)

    def choose(self, session: str, adapter: str | None) -> RoutedReplica | None:
        """A replica for the next sample of the sampling session, which may be any text, "" and "0" too.

        None when none takes work: see ``wait_for_one``.
        """
        open_ones = [routed for routed in self.replicas if routed.takes_work]
        return _best(open_ones, session, adapter) if open_ones else None

    async def wait_for_one(self, *, seconds: float) -> None:
        """Wait until a replica takes work, however long an operator keeps all of them from it.

        Raises ``EngineFailure`` when for ``seconds`` none does, and none is alive.
        """
        alive_at = monotonic()
        while not any(routed.takes_work for routed in self.replicas):
            if any(routed.is_alive for routed in self.replicas):
                alive_at = monotonic()
            left = alive_at + seconds - monotonic()
            if left <= 0:
                raise EngineFailure(f"no sampling replica has taken work for {seconds:.0f} s; try again later")
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait for the next news of a replica."""
        await self._changed.wait()

    def hold(self, routed: RoutedReplica, adapter: str | None, run: RunId | None, sequences: int) -> None:
        """Count the sequences as the replica's load until they are let go."""
        routed.sequences += sequences
        routed.note(adapter, run)

    def let_go(self, routed: RoutedReplica, sequences: int) -> None:
        """They are over."""
        routed.sequences -= sequences

    async def check(self, routed: RoutedReplica) -> None:
        """Ask the replica how it is."""
        self.mark(routed, is_alive=(await routed.replica.health()).alive)

    def mark(self, routed: RoutedReplica, *, is_alive: bool) -> None:
        """Note whether it answers. One that comes back may have lost its adapters."""
        if is_alive and not routed.is_alive:
            routed.adapters.clear()
            routed.is_asleep = None if routed.is_asleep else routed.is_asleep
        routed.is_alive = is_alive
        self._announce()

    def drain(self, routed: RoutedReplica, *, is_draining: bool) -> None:
        """Give it no new samples, or again."""
        if routed.is_draining != is_draining:
            routed.is_draining = is_draining
            self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _best(replicas: Sequence[RoutedReplica], session: str, adapter: str | None) -> RoutedReplica:
    total = sum(routed.sequences for routed in replicas) + 1
    bound = math.ceil(LOAD_FACTOR * total / len(replicas))
    fitting = [routed for routed in replicas if routed.sequences < bound] or list(replicas)
    ranked = sorted(fitting, key=lambda routed: _weight(session, routed.name), reverse=True)
    if adapter is not None and adapter not in ranked[0].adapters:
        holders = [routed for routed in ranked if adapter in routed.adapters]
        if holders:
            return holders[0]
    return ranked[0]


def _weight(session: str, replica: str) -> bytes:
    return blake2b(f"{session}\0{replica}".encode(), digest_size=8).digest()
