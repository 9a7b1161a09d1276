"""Choice of the payloads that one look at the ledger loads: so many bytes at most, tenants in turn. No I/O here.

Few stored bytes may take many in memory. Work that cannot go on for lack of memory would take every tenant's along.
"""

from collections.abc import Callable, Collection
from math import inf

from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import PendingOperation
from contracts.operations import TrainingBatch
from workers.training.lanes import Lane, Lanes

LOADED_BYTES = 64 * 2**20
"""Bytes of payloads that one look loads, at most, unless one operation alone has more."""
KEPT_BYTES = 4 * LOADED_BYTES
"""Bytes from which on a tenant's lanes load no more while its passes go on. A pass finds the next operations loaded."""
_MOST_AT_ONCE = 512


class PayloadChoice:
    """Says which payloads of one base model's lanes are to be loaded."""

    def __init__(self, lanes: Lanes, token_budget: int, *, is_resident: Callable[[RunId], bool]) -> None:
        """``token_budget``: tokens of a pass. ``is_resident`` tells whether a run's adapter is in memory."""
        self._lanes = lanes
        self._token_budget = token_budget
        self._is_resident = is_resident
        self._unread: set[RequestId] = set()
        """Operations that could not be read at the last try. Others go first."""

    def wanted(self) -> dict[TenantId, list[PendingOperation]]:
        """Return the operations that are to be loaded by tenant, oldest first. The tenant of the oldest is first.

        A tenant that has enough loaded waits, as long as a pass that may run makes room. Its oldest operation never waits.
        """
        lanes: dict[TenantId, list[Lane]] = {}
        found: dict[TenantId, list[PendingOperation]] = {}
        for lane in self._lanes:
            lanes.setdefault(lane.tenant, []).append(lane)
            if chosen := lane.to_load(self._token_budget):
                found.setdefault(lane.tenant, []).extend(chosen)
        for tenant, operations in found.items():
            last = self._last_position(lanes[tenant])
            found[tenant] = sorted((one for one in operations if one.position <= last), key=self._place)
        some = [(tenant, operations) for tenant, operations in found.items() if operations]
        return dict(sorted(some, key=lambda one: self._place(one[1][0])))

    def _place(self, operation: PendingOperation) -> tuple[bool, int]:
        return operation.id in self._unread, operation.position

    def is_to_go_on(self, chosen: Collection[RequestId], loaded: Collection[RequestId]) -> bool:
        """Take note of what was loaded of the ``chosen``. Return whether another look may load more at once."""
        missing = set(chosen).difference(loaded)
        has_news = bool(loaded) or not missing <= self._unread
        wanted = self.wanted()
        self._unread = (self._unread | missing) & {one.id for some in wanted.values() for one in some}
        return has_news and bool(wanted)

    def _last_position(self, lanes: list[Lane]) -> float:
        """Return the position up to which the tenant's operations may be loaded."""
        loaded = [one for lane in lanes for one in lane.loaded.values()]
        is_full = sum(one.nbytes for one in loaded) >= KEPT_BYTES
        # An operation that may not run for long must not keep others from running.
        if is_full and any(self._may_run(lane) for lane in lanes):
            return min(one.position for one in loaded)
        return inf

    def _may_run(self, lane: Lane) -> bool:
        head = lane.head
        return head is not None and isinstance(head.payload, TrainingBatch) and self._is_resident(lane.run)


def choose(wanted: dict[TenantId, list[PendingOperation]]) -> list[RequestId]:
    """Return the operations to load now: in each turn one of each tenant, as long as it fits into ``LOADED_BYTES``.

    The oldest is always among them. However large it is, it leaves half of the bytes to others.
    """
    chosen: list[RequestId] = []
    left = LOADED_BYTES
    queues = [iter(operations) for operations in wanted.values()]
    while queues and len(chosen) < _MOST_AT_ONCE:
        going = []
        for queue in queues:
            one = next(queue, None)
            if one is None or len(chosen) == _MOST_AT_ONCE or (chosen and one.nbytes > left):
                continue
            left -= one.nbytes if chosen else min(one.nbytes, LOADED_BYTES // 2)
            chosen.append(one.id)
            going.append(queue)
        queues = going
    return chosen
