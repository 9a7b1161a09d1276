"""Samples go to replicas: what each draws from now, the gates before it, and the note that it is in flight.

Those that come at one moment, as when a version cuts the samples of a run, share a transaction: its statements are a large
part of what a sample costs weft.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound, Unavailable, WeftError
from contracts.ids import RunId
from contracts.ledger_records import ReadyOperation
from engine.sampling.background_tasks import Background
from engine.sampling.replica import AdapterVersion, GenerateRequest
from ledger.ledger import Ledger
from ledger.token_feed import FeedKey
from store.batcher import Batcher
from store.clock import Clock
from store.data_folder import DataFolder
from store.database import Database
from tenants.gates import Dispatch, GateMode, clear_in_flight, mark_in_flight, update_in_flight
from tenants.samplers import SampledVersion, Staleness, sampled_versions, versions_followed
from workers.sampling.gate_cache import GateCache
from workers.sampling.router import RoutedReplica, Router

log = logging.getLogger(__name__)

REPLICA_WAIT_SECONDS = 300.0
"""How long a sample waits for a replica that takes work."""
_NOTES_SECONDS = 30.0
"""How long the end of the process waits for notes of where samples are."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a sample draws from now. ``is_live``: it follows its run's newest version.

    ``publication`` is the version's number among those that the sampler has followed.
    """

    run: RunId | None
    version: AdapterVersion | None
    is_live: bool
    publication: int = 0
    staleness: Staleness | None = None

    @property
    def name(self) -> str | None:
        """The version's, None for the bare base."""
        return None if self.version is None else self.version.name


@dataclass(slots=True, eq=False)
class Attempt:
    """A sample on a replica, ``sequences`` of its load.

    ``is_cut`` holds before it has begun, too; ``is_aborted`` gives it up where it is. ``left``: what it
    draws is not waited for any more. ``newer``: what its sampler follows by now. ``is_noted``: the row that says that it
    is in flight has its version and replica.
    """

    operation: ReadyOperation
    source: Source
    routed: RoutedReplica
    sequences: int
    requests: list[GenerateRequest] = field(default_factory=list)
    is_cut: bool = False
    is_aborted: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    left_at: float | None = None
    newer: Source | None = None
    is_noted: bool = True

    @property
    def key(self) -> FeedKey:
        """What its tokens are followed by."""
        return self.operation.lane, self.operation.seq_id

    def uses(self, version: str) -> bool:
        """Whether it draws from ``version``, or what takes its place may."""
        return version in (self.source.name, self.newer.name if self.newer is not None else None)

    def leave(self) -> None:
        """Go on without the tokens that are just being made."""
        if not self.is_cut:
            self.is_cut = True
            self.left_at = monotonic()
            self.left.set_result(None)

    def follow_up(self, failure: WeftError | None) -> Source | None:
        """What the sample goes on with in flight; None: it is to be dispatched, as behind a ``failure`` or a gate's cut."""
        return self.newer if failure is None and self.left.done() else None


@dataclass(slots=True, eq=False)
class _Asked:
    """A sample that wants to run. ``attempt`` once a round has one for it; ``is_gone``: nobody waits for that."""

    operation: ReadyOperation
    sequences: int
    attempt: Attempt | None = None
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    """``attempt`` None: no replica takes it, or a gate was seen closed. ``is_noted``: it is in flight."""

    source: Source
    attempt: Attempt | None
    is_noted: bool
    was_in_flight: bool


class Dispatcher:
    """Begins the attempts of one base model's samples in one process. Used from one event loop."""

    def __init__(
        self,
        *,
        base_model: str,
        router: Router,
        gate_cache: GateCache,
        database: Database,
        ledger: Ledger,
        data_folder: DataFolder,
        clock: Clock,
        process: str,
    ) -> None:
        """``process`` names this process among those that sample."""
        self._base_model = base_model
        self._router = router
        self._gate_cache = gate_cache
        self._database = database
        self._ledger = ledger
        self._data_folder = data_folder
        self._clock = clock
        self._process = process
        self._rounds: Batcher[_Asked, _Answer] = Batcher(self._round)
        self._moves: Batcher[Attempt, None] = Batcher(self._note_moves)
        self._background = Background()
        self.attempts: set[Attempt] = set()
        """Those that are not over."""

    def go_on(self, operation: ReadyOperation, sequences: int, newer: Source) -> Attempt | None:
        """An attempt on ``newer`` for a sample that is in flight, right behind the one that it was left for.

        It stays in flight: whoever closes a gate finds its row, or one of the two attempts. None: a gate is closed, or no
        replica takes it.
        """
        attempt = self._attempt(operation, sequences, newer)
        if attempt is not None:
            attempt.is_noted = False
        return attempt

    def note_move(self, attempt: Attempt) -> None:
        """Have the row of a sample that went on say where it is now."""
        attempt.is_noted = True
        self._background.start(self._moved(attempt))

    async def follow(self) -> list[Attempt]:
        """Tell live samples what their samplers follow by now; returns those that are to go on with that."""
        lanes = [attempt.operation.lane for attempt in self.attempts if attempt.source.is_live]
        if not lanes:
            return []
        async with self._database.read() as session:
            followed = await versions_followed(session, lanes, self._clock)
        behind = []
        for attempt in self.attempts:
            found = followed.get(attempt.operation.lane)
            # One that began meanwhile may be ahead of what was read.
            if found is not None and attempt.source.is_live and found.publications > attempt.source.publication:
                attempt.newer = self._source_of(found)
                behind.append(attempt)
        return behind

    async def begin(self, operation: ReadyOperation, sequences: int) -> Attempt | None:
        """Wait until the sample may run and a replica takes it, and note that it is in flight, with so many sequences.

        None: it was, between two attempts, when a gate closed that ends what is in flight. Raises ``NotFound`` when its
        adapter is gone, ``Unavailable``, and ``EngineFailure`` when no replica is alive for long.
        """
        was_in_flight = False
        while True:
            answer = await self._ask(_Asked(operation, sequences))
            was_in_flight = was_in_flight or answer.was_in_flight
            attempt, run = answer.attempt, answer.source.run
            if attempt is not None and answer.is_noted:
                if attempt.routed.takes_work:
                    return attempt
                # An operator's order came meanwhile.
                self.end(attempt)
            elif was_in_flight and any(gate.mode is GateMode.ABORT for gate in self._gate_cache.before(run)):
                return None
            elif attempt is not None:
                # A gate that this process had not heard of.
                await self._gate_cache.refresh()
            elif self._gate_cache.before(run):
                # Other gates change, too; this one is looked at in memory.
                while self._gate_cache.before(run):
                    await self._gate_cache.wait_for_change(run)
            else:
                await self._router.wait_for_one(seconds=REPLICA_WAIT_SECONDS)

    def end(self, attempt: Attempt) -> None:
        """It is over; safe to repeat."""
        if attempt in self.attempts:
            self.attempts.remove(attempt)
            self._router.let_go(attempt.routed, attempt.sequences)
            attempt.over.set()

    async def settle(self) -> None:
        """Wait until nothing more is noted for samples that have been given up."""
        await self._background.close(_NOTES_SECONDS)
        await self._moves.settle()
        await self._rounds.settle()

    async def source(self, session: AsyncSession, operation: ReadyOperation) -> Source:
        """The version to sample now: the pinned one, a live sampler's newest, or none for the bare base.

        Raises ``NotFound`` when the sampler or its checkpoint is gone.
        """
        (sampled,) = await sampled_versions(session, [(operation.tenant, operation.lane)], self._clock)
        if isinstance(sampled, NotFound):
            raise sampled
        return self._source_of(sampled)

    async def leave(self, operation: ReadyOperation) -> None:
        """The sample is not in flight any more, and those who wait for that are told."""
        async with self._database.write() as transaction:
            await self._leave(transaction, [operation])

    async def _ask(self, asked: _Asked) -> _Answer:
        try:
            return await self._rounds.ask(asked)
        except asyncio.CancelledError:
            asked.is_gone = True
            if asked.attempt is not None:
                self.end(asked.attempt)
            raise

    async def _round(self, asked: Sequence[_Asked]) -> list[_Answer | WeftError]:
        """One transaction for all of them."""
        begun: list[Attempt] = []
        try:
            async with self._database.write() as transaction:
                # Held: a version published from now on finds the attempts among those to be cut.
                sampled = await sampled_versions(
                    transaction, [(one.operation.tenant, one.operation.lane) for one in asked], self._clock, hold=True
                )
                sources = [found if isinstance(found, NotFound) else self._source_of(found) for found in sampled]
                for one, source in zip(asked, sources, strict=True):
                    if not isinstance(source, NotFound):
                        one.attempt = self._attempt(one.operation, one.sequences, source)
                    if one.attempt is not None:
                        begun.append(one.attempt)
                noted = await self._enter(transaction, begun)
                left = await self._leave(transaction, [one.operation for one in asked if one.attempt not in noted])
        except BaseException:
            for attempt in begun:
                self.end(attempt)
            raise
        for attempt in begun:
            if attempt not in noted:
                self.end(attempt)
        answers: list[_Answer | WeftError] = []
        for one, source in zip(asked, sources, strict=True):
            if isinstance(source, NotFound):
                answers.append(source)
                continue
            if one.is_gone and one.attempt is not None:
                self.end(one.attempt)
            answers.append(_Answer(source, one.attempt, one.attempt in noted, one.operation.id in left))
        return answers

    def _attempt(self, operation: ReadyOperation, sequences: int, source: Source) -> Attempt | None:
        """Known before it is in flight: a gate that closes from now on finds it. None: it cannot run now."""
        routed = None if self._gate_cache.before(source.run) else self._router.choose(operation.lane, source.name)
        if routed is None:
            return None
        # Already its load: the next one of the round is to see it.
        self._router.hold(routed, source.name, source.run, sequences)
        attempt = Attempt(operation, source, routed, sequences)
        self.attempts.add(attempt)
        return attempt

    async def _enter(self, transaction: AsyncSession, attempts: Sequence[Attempt]) -> set[Attempt | None]:
        """Note that they are in flight; returns those that gates let in."""
        if not attempts:
            return set()
        entered = await mark_in_flight(transaction, [self._dispatch(attempt) for attempt in attempts], self._clock)
        return {attempt for attempt, is_in in zip(attempts, entered, strict=True) if is_in}

    def _dispatch(self, attempt: Attempt) -> Dispatch:
        return Dispatch(
            operation=attempt.operation.id,
            tenant=attempt.operation.tenant,
            base_model=self._base_model,
            run=attempt.source.run,
            version=attempt.source.name,
            replica=attempt.routed.name,
            process=self._process,
        )

    async def _leave(self, transaction: AsyncSession, operations: Sequence[ReadyOperation]) -> set[str]:
        left = await clear_in_flight(transaction, [operation.id for operation in operations], self._process)
        if left:
            self._ledger.announce_cleared_samples(transaction, self._base_model)
        return left

    async def _moved(self, attempt: Attempt) -> None:
        try:
            await self._moves.ask(attempt)
        except Unavailable as outage:
            # It only tells which version is drawn: its next dispatch does, too.
            log.warning("%s", outage.message)
        except Exception:
            log.exception("operation=%s went on and its row does not say so", attempt.operation.id)

    async def _note_moves(self, moved: Sequence[Attempt]) -> list[None]:
        places: dict[tuple[str | None, str], list[Attempt]] = {}
        for attempt in moved:
            places.setdefault((attempt.source.name, attempt.routed.name), []).append(attempt)
        for (version, replica), attempts in places.items():
            if operations := [attempt.operation.id for attempt in attempts if attempt in self.attempts]:
                async with self._database.write_one() as session:
                    await update_in_flight(session, operations, self._process, version=version, replica=replica)
        return [None] * len(moved)

    def _source_of(self, sampled: SampledVersion) -> Source:
        version = None
        if sampled.checkpoint is not None and sampled.directory is not None:
            version = AdapterVersion(name=sampled.checkpoint, directory=self._data_folder.path(sampled.directory))
        return Source(sampled.run, version, sampled.is_live, sampled.publications, sampled.staleness)
