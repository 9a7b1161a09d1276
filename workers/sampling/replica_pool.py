"""The replicas of one base model: started side by side, watched, and replaced when they are lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from contracts.errors import EngineFailure, InvalidRequest
from tenants.replica_directives import ReplicaDirective, StandingDirective
from workers.sampling.replica_sources import ReplicaSource
from workers.sampling.router import RoutedReplica, Router

log = logging.getLogger(__name__)

ReadOrders = Callable[[], Awaitable[Mapping[str, StandingDirective]]]

WATCH_SECONDS = 2.0
"""Time between two looks at a replica's health."""
MISSED_LOOKS = 3
"""So many looks in a row without an answer, and a replica is started again."""
_LONGEST_PAUSE_SECONDS = 60.0


class ReplicaPool:
    """Keeps ``router`` supplied by ``sources``, as operators' ``orders`` allow: read at each look."""

    def __init__(self, router: Router, sources: Sequence[ReplicaSource], orders: ReadOrders) -> None:
        self.router = router
        self._sources = sources
        self._orders = orders
        self._sleepless: set[str] = set()
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Start all of them; those that fail now are tried again later.

        Raises ``InvalidRequest`` when one is not as the settings say, ``EngineFailure`` when none could be started.
        """
        starting = [asyncio.create_task(self._start_one(source)) for source in self._sources]
        ends = await asyncio.gather(*starting, return_exceptions=True)
        failures = [end for end in ends if isinstance(end, BaseException)]
        refusals = [failure for failure in failures if not isinstance(failure, EngineFailure)]
        if refusals or len(failures) == len(self._sources):
            await self.close()
            raise (refusals or failures)[0]
        for failure in failures:
            log.error("a replica could not be started; trying again: %s", failure)
        self._watchers = [asyncio.create_task(self._watch(source), name=source.name) for source in self._sources]

    async def close(self) -> None:
        """End the replicas, and the servers that weft started."""
        self._stopping.set()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(routed.replica.close() for routed in self.router.replicas), return_exceptions=True)
        await asyncio.gather(*(source.stop() for source in self._sources), return_exceptions=True)

    async def _start_one(self, source: ReplicaSource) -> None:
        replica = await source.start()
        if replica.name != source.name:
            raise RuntimeError(
                f"the source {source.name} started a replica {replica.name}: its watcher would not find it"
            )
        log.info("replica %s takes work", source.name)
        self._sleepless.discard(source.name)
        self.router.put(replica, is_draining=source.name in await self._orders())

    async def _watch(self, source: ReplicaSource) -> None:
        missed, pause = 0, WATCH_SECONDS
        while not await self._stopped_within(pause):
            pause = WATCH_SECONDS
            routed = self.router.find(source.name)
            if routed is not None:
                await self.router.check(routed)
                missed = 0 if routed.is_alive else missed + 1
                if missed < MISSED_LOOKS:
                    await self._obey(routed)
                    continue
                log.warning("replica %s does not answer; starting it again", source.name)
                await routed.replica.close()
            try:
                await self._start_one(source)
                missed = 0
            except Exception as failure:  # noqa: BLE001 - the edge of a watcher, which must go on
                missed += 1
                pause = min(WATCH_SECONDS * 2.0**missed, _LONGEST_PAUSE_SECONDS)
                log.error("replica %s could not be started: %s", source.name, failure)

    async def _obey(self, routed: RoutedReplica) -> None:
        """Do what operators want of a replica; what fails is tried again at the next look."""
        try:
            standing = (await self._orders()).get(routed.name)
            self.router.drain(routed, is_draining=standing is not None or routed.is_asleep is not False)
            wanted = standing is not None and standing.directive is ReplicaDirective.SLEEP
            if wanted is routed.is_asleep or not routed.is_alive:
                return
            if wanted and (routed.sequences or routed.name in self._sleepless):
                return
            routed.is_asleep = None
            await (routed.replica.sleep() if wanted else routed.replica.wake_up())
            routed.is_asleep = wanted
            self.router.drain(routed, is_draining=standing is not None)
            log.info("replica %s %s", routed.name, "sleeps" if wanted else "is awake")
        except InvalidRequest as refusal:
            # It never will: drained is what is left of the order.
            routed.is_asleep = False
            self._sleepless.add(routed.name)
            log.warning("replica %s cannot sleep: %s", routed.name, refusal.message)
        except Exception as failure:  # noqa: BLE001 - the edge of a watcher, which must go on
            log.error("replica %s: an operator's order was not carried out: %s", routed.name, failure)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True
