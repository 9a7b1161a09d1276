"""Pool of one base model's replicas: starts them side by side, watches their health, and replaces failed ones."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from uuid import uuid4

import numpy as np

from contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.sampling.handshake import Handshake
from engine.sampling.replica import GenerateRequest, SamplerReplica
from store.repeat import repeat, wait_for_any
from tenants.replica_directives import ReplicaDirective, StandingDirective
from workers.sampling.replica_sources import ReplicaSource
from workers.sampling.router import RoutedReplica, Router

log = logging.getLogger(__name__)

ReadDirectives = Callable[[], Awaitable[Mapping[str, StandingDirective]]]
"""Reads the replica directives that stand, by the replica's name."""

WATCH_SECONDS = 2.0
"""Seconds between two looks at a replica's health."""
MISSED_LOOKS = 3
"""Looks in a row without an answer after which a replica is started again."""
PROBE_SECONDS = 10.0
"""Longest wait for the token by which a doubtful replica shows that it draws."""
_MOST_DOUBLINGS = 10
"""Most doublings of the pause: a float has room for a thousand, and a server may be away for longer."""
_LONGEST_PAUSE_SECONDS = 60.0


class ReplicaPool:
    """Replicas made by ``sources`` and offered to ``router``, as the operators' replica directives allow."""

    def __init__(
        self,
        router: Router,
        sources: Sequence[ReplicaSource],
        read_directives: ReadDirectives,
        handshake: Handshake | None = None,
    ) -> None:
        """``read_directives`` is called at each look at a replica. Each replica passes the ``handshake`` before it takes work."""
        self.router = router
        self._handshake = handshake
        self._sources = sources
        self._read_directives = read_directives
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Start all replicas. A replica that fails now is tried again later.

        Raises ``InvalidRequest`` when one is not as the settings say, ``EngineFailure`` when none could be started.
        """
        watches = [
            _ReplicaWatch(source, self.router, self._read_directives, self._handshake) for source in self._sources
        ]
        ends = await asyncio.gather(*(watch.start_replica() for watch in watches), return_exceptions=True)
        failures = [end for end in ends if isinstance(end, BaseException)]
        refusals = [failure for failure in failures if not isinstance(failure, EngineFailure)]
        if refusals or len(failures) == len(self._sources):
            await self.close()
            raise (refusals or failures)[0]
        for failure in failures:
            log.error("a replica could not be started; trying again: %s", failure)
        self._watchers = [asyncio.create_task(watch.run(self._stopping), name=watch.name) for watch in watches]

    async def until_failed(self) -> None:
        """Return when the watch over a replica has ended, which none does before ``close``. Raises ``ProcessMustEnd``."""
        done, _ = await asyncio.wait(self._watchers, return_when=asyncio.FIRST_COMPLETED)
        for watcher in done:
            await watcher

    async def close(self) -> None:
        """Close the replicas, and stop the servers that weft started."""
        self._stopping.set()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(routed.replica.close() for routed in self.router.replicas), return_exceptions=True)
        await asyncio.gather(*(source.stop() for source in self._sources), return_exceptions=True)
        if self._handshake is not None:
            await self._handshake.close()


class _ReplicaWatch:
    """Watch over the replica of one source."""

    def __init__(
        self, source: ReplicaSource, router: Router, read_directives: ReadDirectives, handshake: Handshake | None
    ) -> None:
        self._source = source
        self._handshake = handshake
        self._router = router
        self._read_directives = read_directives
        self._missed = 0
        """Looks or starts in a row that failed."""
        self._pause = WATCH_SECONDS
        """Seconds until the next look."""

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self._source.name

    async def run(self, stopping: asyncio.Event) -> None:
        """Look at the replica until ``stopping``, for the first time after ``WATCH_SECONDS``."""
        if not await wait_for_any([stopping], WATCH_SECONDS):
            failed = f"replica {self.name} could not be watched"
            await repeat(self._look, seconds=lambda: self._pause, stopping=stopping, failed=failed)

    async def start_replica(self) -> None:
        """Start the replica and offer it to the router, drained if a directive stands.

        Raises as ``source.start``, and ``EngineFailure`` for a replica that does not compute what the trainer computes.
        """
        # Read first: a replica that is up must not be thrown away because the database is not.
        directives = await self._read_directives()
        replica = await self._started()
        if replica.name != self.name:
            raise RuntimeError(
                f"the source {self.name} started a replica {replica.name}: its watcher would not find it"
            )
        log.info("replica %s takes work", self.name)
        self._router.put(replica, is_draining=self.name in directives)

    async def _started(self) -> SamplerReplica:
        """Return the replica once it has started and passed the handshake."""
        if self._handshake is None:
            return await self._source.start()
        with self._handshake.held():
            return await self._compared(self._handshake)

    async def _compared(self, handshake: Handshake) -> SamplerReplica:
        # Prepared meanwhile: a server takes half a minute to start, and the trainer's forward seconds to load the base.
        preparing = asyncio.create_task(handshake.prepare())
        try:
            replica = await self._source.start()
            is_sound = False
            try:
                await handshake.run(replica, await preparing)
                is_sound = True
            finally:
                if not is_sound:
                    await replica.close()
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
        return replica

    async def _look(self) -> None:
        """Check the replica's health and follow its directive, or start it again after ``MISSED_LOOKS`` misses."""
        self._pause = WATCH_SECONDS
        if self._handshake is not None:
            self._handshake.check()
        routed = self._router.find(self.name)
        if routed is not None:
            await self._router.check(routed)
            if routed.is_alive and routed.is_doubtful and routed.is_asleep is False:
                await self._probe(routed)
            self._missed = 0 if routed.works else self._missed + 1
            if self._missed < MISSED_LOOKS:
                await self._follow_directive(routed)
                return
            trouble = "fails or hangs" if routed.is_alive else "does not answer"
            log.warning("replica %s %s; starting it again", self.name, trouble)
            await routed.replica.close()
        await self._restart()

    async def _probe(self, routed: RoutedReplica) -> None:
        """Have the replica draw a token of the bare base, and record whether it does."""
        request = GenerateRequest(f"probe-{uuid4().hex}", np.array([0, 0]), (None,), max_tokens=1)
        is_failing = True
        try:
            async with asyncio.timeout(PROBE_SECONDS), aclosing(routed.replica.generate(request)) as batches:
                async for _ in batches:
                    is_failing = False
        except (WeftError, TimeoutError) as failure:
            log.warning("replica %s draws nothing: %r", self.name, failure)
        self._router.note_drawing(routed, is_failing=is_failing)

    async def _restart(self) -> None:
        # Set before the start, so that both hold however the start fails.
        self._missed += 1
        self._pause = min(WATCH_SECONDS * 2.0 ** min(self._missed, _MOST_DOUBLINGS), _LONGEST_PAUSE_SECONDS)
        try:
            await self.start_replica()
        except WeftError as failure:
            log.error("replica %s could not be started: %s", self.name, failure)
            return
        self._missed, self._pause = 0, WATCH_SECONDS

    async def _follow_directive(self, routed: RoutedReplica) -> None:
        """Drain, put to sleep or wake the replica as its directive says. The next look tries again what fails."""
        try:
            standing = (await self._read_directives()).get(routed.name)
            self._router.drain(routed, is_draining=standing is not None or routed.is_asleep is not False)
            must_sleep = standing is not None and standing.directive is ReplicaDirective.SLEEP
            if not must_sleep:
                self._router.note_refusal(routed, cannot_sleep=False)
            if must_sleep is routed.is_asleep or not routed.is_alive:
                return
            if must_sleep and (routed.sequences or routed.cannot_sleep):
                return
            routed.is_asleep = None
            await (routed.replica.sleep() if must_sleep else routed.replica.wake_up())
            routed.is_asleep = must_sleep
            self._router.drain(routed, is_draining=standing is not None)
            log.info("replica %s %s", routed.name, "sleeps" if must_sleep else "is awake")
        except InvalidRequest as refusal:
            # The replica can never sleep. It stays drained, which is the other half of the directive.
            routed.is_asleep = False
            self._router.note_refusal(routed, cannot_sleep=True)
            log.warning("replica %s cannot sleep: %s", routed.name, refusal.message)
        except WeftError as failure:
            log.error("replica %s: an operator's directive was not carried out: %s", routed.name, failure)
