"""State machine of an attempt: one try to draw a sample on one replica, from its start until it has ended.

| from \\ to | CUT | LEFT | ABORTED | ENDED |
|---|---|---|---|---|
| RUNNING | a ``keep`` gate closed | a newer version was published | an ``abort`` gate closed | all requests have ended |
| CUT, LEFT | | | an ``abort`` gate closed | all requests have ended |
| ABORTED | | | | all requests have ended |
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic

from contracts.errors import WeftError
from contracts.ledger_records import ReadyOperation
from contracts.operations import SampleRequest
from engine.sampling.replica import GenerateRequest
from ledger.token_feed import FeedKey
from workers.sampling.router import RoutedReplica
from workers.sampling.weight_source import WeightSource


class AttemptState(Enum):
    """State of an attempt; decides how the sample goes on after it."""

    RUNNING = "running"
    """The replica draws the sample, or is about to. An attempt that ends from here is complete or has failed."""
    CUT = "cut"
    """A ``keep`` gate has cut the attempt. The sample is dispatched again and waits at the gate."""
    LEFT = "left"
    """A newer version was published. The sample stays in flight and resumes on that version at once."""
    ABORTED = "aborted"
    """An ``abort`` gate has cut the attempt. The sample ends with the tokens that it has."""
    ENDED = "ended"
    """All requests have ended. ``Attempt.before_end`` names the state that the attempt ended from."""


MOVES: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.RUNNING: frozenset({AttemptState.CUT, AttemptState.LEFT, AttemptState.ABORTED, AttemptState.ENDED}),
    AttemptState.CUT: frozenset({AttemptState.ABORTED, AttemptState.ENDED}),
    AttemptState.LEFT: frozenset({AttemptState.ABORTED, AttemptState.ENDED}),
    AttemptState.ABORTED: frozenset({AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}
"""States that each state may move to."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One try to draw a sample on a replica. Used from one event loop."""

    operation: ReadyOperation
    source: WeightSource
    """Weights that the attempt draws from."""
    routed: RoutedReplica
    sequences: int
    """Unfinished sequences of the sample: the attempt's part of the replica's load."""
    requests: list[GenerateRequest] = field(default_factory=list)
    """Requests to the replica; empty before streaming begins. An attempt may be cut before that."""
    newer: WeightSource | None = None
    """Newer weights that the sampler follows by now; None while the sampler follows ``source``. Set in any state."""
    is_row_current: bool = True
    """True if the sample's in-flight row names the attempt's version and replica. Independent of the state."""
    is_owed_tokens: bool = False
    """True until each sequence has a token of it, if an earlier attempt was left before that: no version cuts it till then."""
    cache_clears: int | None = None
    """``Entered.cache_clears`` of the sample's entry; None for an attempt that resumes without entering its gates again."""
    state: AttemptState = field(default=AttemptState.RUNNING, init=False)
    before_end: AttemptState = field(default=AttemptState.RUNNING, init=False)
    """Last state other than ``ENDED``: the present state, or the one that the attempt ended from."""
    left: asyncio.Future[None] = field(init=False)
    """Done once the state is ``LEFT``; stays done."""
    left_at: float | None = field(default=None, init=False)
    """Monotonic seconds of the move to ``LEFT``."""

    def __post_init__(self) -> None:
        self.left = asyncio.get_running_loop().create_future()

    @property
    def key(self) -> FeedKey:
        """Key under which followers subscribe to the sample's tokens."""
        return self.operation.lane, self.operation.seq_id

    @property
    def is_cut(self) -> bool:
        """True once a gate or a newer version has cut the attempt. No request of it begins any more."""
        return self.before_end is not AttemptState.RUNNING

    @property
    def in_one_piece(self) -> bool:
        """True if the sample would begin anew after a cut."""
        payload = self.operation.payload
        return isinstance(payload, SampleRequest) and payload.in_one_piece

    def may_move(self, to: AttemptState) -> bool:
        """Return whether ``move`` to this state is legal now."""
        return to in MOVES[self.state]

    def move(self, to: AttemptState) -> None:
        """Change the state. Raises ``RuntimeError`` for a move that ``MOVES`` does not list."""
        if not self.may_move(to):
            raise RuntimeError(f"an attempt cannot move from {self.state.value} to {to.value}")
        self.state = to
        if to is AttemptState.ENDED:
            return
        self.before_end = to
        if to is AttemptState.LEFT:
            self.left_at = monotonic()
            self.left.set_result(None)

    def uses(self, version: str) -> bool:
        """Return whether this attempt draws from ``version``, or the attempt that follows it may."""
        return version in (self.source.name, self.newer.name if self.newer is not None else None)

    def resumes_on(self, failure: WeftError | None) -> WeightSource | None:
        """Return the weights on which the sample resumes while it stays in flight; ``failure`` is the attempt's, if any.

        None: the sample must be dispatched again, as after a failure or a gate's cut, or the sample is finished.
        """
        return self.newer if failure is None and self.before_end is AttemptState.LEFT else None
