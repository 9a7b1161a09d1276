"""Turns of suspects: operations at which a trainer has died run alone, so that another death takes nobody along.

In a suspect's turn nothing else begins, and the turn waits until nothing else runs. Other work goes first for a short while,
and has a round between two turns. No I/O here.
"""

from collections.abc import Callable
from time import monotonic

from contracts.ids import RequestId, RunId
from contracts.ledger_records import ReadyOperation
from ledger.work_in_hand import WorkInHand
from workers.training.creation_limits import CreationLimits
from workers.training.lanes import Lane, Lanes, creates

PATIENCE_SECONDS = 0.5
"""Time for which other work goes before a suspect that has just come, so that neighbours are not held up by its deaths."""
_STUCK_SECONDS = 1.0
"""Time for which a suspect that could not begin gets no turn, as when its adapter finds no room in memory."""

_LONGEST_WAIT_SECONDS = 10.0
"""Longest time for which nothing begins before a suspect's turn, as while another adapter's file is slow to write.

A suspect that is to be tried again gets no turn for as long.
"""


class Turns:
    """Decides in each round which lanes of one base model may begin work."""

    def __init__(
        self,
        lanes: Lanes,
        in_hand: WorkInHand,
        creations: CreationLimits,
        *,
        most_attempts: int,
        again: Callable[[], None],
    ) -> None:
        """Call ``again`` to have another round soon. An operation with ``most_attempts`` attempts gets no turn."""
        self.creations = creations
        self._lanes = lanes
        self._in_hand = in_hand
        self._most_attempts = most_attempts
        self.again = again
        self._alone: tuple[RunId, RequestId] | None = None
        self._is_waiting = False
        self._waiting_since: float | None = None
        """Monotonic seconds since which everybody waits for a suspect's turn."""
        self._owes_others = True
        """Other work has the next round, whatever waits."""
        self._begun = 0
        """``WorkInHand.begun`` at the last choice."""
        self._was_quiet = True
        self._seen: dict[RequestId, float] = {}
        """Monotonic seconds of the first choice that knew the suspect."""
        self._stuck_until: dict[RequestId, float] = {}
        """Monotonic seconds until which the suspect gets no turn, even when its lane was dropped meanwhile."""

    def allows(self, lane: Lane) -> bool:
        """Return whether the lane may begin work in this round."""
        if self._is_waiting:
            return False
        if self._alone is not None:
            return lane.run == self._alone[0]
        head = lane.head
        return head is not None and not head.attempts

    def put_off(self, operation: RequestId) -> None:
        """Give the operation no turn for a while, and end the one that it has: a try of it has ended without an outcome."""
        self._stuck_until[operation] = monotonic() + _LONGEST_WAIT_SECONDS

    def choose(self, *, is_computing: bool) -> None:
        """Choose who may begin from now on: one suspect alone, nobody while it waits for that, or everybody else.

        ``is_computing``: a pass runs or is planned.
        """
        is_quiet = not (is_computing or self._in_hand or any(lane.is_busy for lane in self._lanes))
        has_progress = self._in_hand.begun != self._begun or not self._was_quiet
        self._begun, self._was_quiet = self._in_hand.begun, is_quiet
        suspects, has_others = self._heads()
        now = monotonic()
        self._seen = {one: self._seen.get(one, now) for one in suspects}
        self._stuck_until = {one: until for one, until in self._stuck_until.items() if until > now}
        if self._alone is not None:
            if self._alone[1] in suspects and self._alone[1] not in self._stuck_until:
                if has_progress or not is_quiet:
                    self._again_if(is_quiet)
                    return
                self._stuck_until[self._alone[1]] = now + _STUCK_SECONDS
            self._alone, self._owes_others = None, True
        self._is_waiting = False
        waiting = [one for one in suspects if one not in self._stuck_until]
        if not waiting:
            self._owes_others = True
            return
        first = min(waiting, key=lambda one: (self._seen[one], suspects[one].position))
        is_early = has_progress and now < self._seen[first] + PATIENCE_SECONDS
        if has_others and (self._owes_others or is_early):
            self._owes_others = False
            self._again_if(is_quiet)
        elif not is_quiet:
            self._wait_or_give_way(first, now)
        else:
            self._waiting_since = None
            self._alone = RunId(suspects[first].lane), first
            self.again()

    def _wait_or_give_way(self, suspect: RequestId, now: float) -> None:
        """Have everybody wait until all is quiet; after ``_LONGEST_WAIT_SECONDS`` let the others go on first."""
        self._waiting_since = self._waiting_since or now
        if now - self._waiting_since < _LONGEST_WAIT_SECONDS:
            self._is_waiting = True
            return
        self._stuck_until[suspect] = now + _LONGEST_WAIT_SECONDS
        self._waiting_since, self._owes_others = None, True
        self.again()

    def _heads(self) -> tuple[dict[RequestId, ReadyOperation], bool]:
        """Return the suspects that are next in their lanes and may begin, and whether any other operation is."""
        suspects: dict[RequestId, ReadyOperation] = {}
        has_others = False
        for lane in self._lanes:
            head = lane.head
            if head is None:
                continue
            if creates(head) and self.creations.holds_back(lane.tenant, lane.run):
                # A turn would stop everybody for an operation that may not begin.
                continue
            if not head.attempts:
                has_others = True
            elif head.attempts < self._most_attempts:
                suspects[head.id] = head
        return suspects, has_others

    def _again_if(self, is_quiet: bool) -> None:
        """Have another round where no end of work would bring one."""
        if is_quiet:
            self.again()
