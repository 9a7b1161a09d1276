"""Acceptance of training requests within their tenants' limits.

The use of a tenant is counted in the transaction that adds to it. Far from the limits the count comes with the insert and
costs no statement; near them the tenant's requests are accepted one after another, under a lock. So however many processes
accept at once, a tenant gets no more than its limits:

- A request far from the limits holds the lock shared. At most ``_UNLOCKED`` such transactions are open at a time, each with
  at most ``_UNLOCKED_BYTES``, and all of them together fit between "near" and the limit.
- A request near the limits holds it alone, so it counts after those have ended. So does every request of a project that
  bounds its pending training itself: no count of a project comes with the insert.

A tenant's rate (``tenants.rates``) refuses nothing: it is charged with the insert, and says when the operation may run.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from weakref import WeakValueDictionary

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, TooManyOperations
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import NewOperation
from contracts.operations import OperationKind
from ledger import statements as sql
from ledger.ledger import Ledger
from ledger.settlement import Accepted
from store.database import Database, undo
from tenants.limit_use import TRAINING_USE, Use
from tenants.limits import Counted, Limits, hold_count
from tenants.project_limits import PENDING_TRAINING, ProjectUse, oldest_pending, use_of_project
from tenants.rates import Meter

HOLD_SECONDS = 20.0
"""Longest time that a request waits for room before it is answered 429. The SDK gives a POST up after 60 s."""
_LOOK_SECONDS = 2.0
"""Longest time between two looks of a request that waits for room."""
_UNLOCKED = 256
"""More transactions than a database has connections for the processes that accept."""
_UNLOCKED_BYTES = 2**20
_UNITS = {"pending_operations": "operations", "pending_bytes": "bytes"}

Opening = Callable[[AsyncSession], Awaitable[RequestId | None]]
"""Writes what an operation needs, in its transaction; returns the id of the request that it repeats, if it does."""


@dataclass(frozen=True, slots=True)
class _NoRoom:
    """The limits of the tenant, or of the project, are reached. ``oldest``: its pending operation that was accepted first."""

    use: Use | ProjectUse
    oldest: RequestId | None


class TrainingIntake:
    """Accepts training operations. A request beyond its tenant's limits waits for room."""

    def __init__(self, database: Database, ledger: Ledger, *, defaults: Limits, hold_seconds: float) -> None:
        """``defaults`` are the limits of a tenant without values of its own."""
        self._database = database
        self._ledger = ledger
        self._defaults = defaults
        self._hold_seconds = min(hold_seconds, HOLD_SECONDS)
        self._near: WeakValueDictionary[TenantId, asyncio.Lock] = WeakValueDictionary()
        """Locks of the tenants that are near a limit: each occupies one connection of this process at most."""
        self._waiting: WeakValueDictionary[tuple[TenantId, str | None], asyncio.Lock] = WeakValueDictionary()
        """Locks of the tenants and projects whose requests wait for room, which go in order of arrival."""

    async def accept(self, new: NewOperation, limits: Limits, opening: Opening | None = None) -> RequestId:
        """Record ``new`` as ``accept_rated`` and return its request id."""
        return (await self.accept_rated(new, limits, opening)).id

    async def accept_rated(
        self, new: NewOperation, limits: Limits, opening: Opening | None = None, *, project: str | None = None
    ) -> Accepted:
        """Record ``new`` and return its request id; a repeated request gets its first id. Committed on return.

        ``limits`` are the tenant's within its project's. ``project``: one that bounds its pending training itself. An
        operation that alone is over the limits is recorded as failed. Raises ``SequenceConflict``, what ``opening``
        raises, and ``TooManyOperations`` when no room was made in time.
        """
        nbytes = new.payload.counted_bytes
        if nbytes > limits.pending_bytes:
            error = _too_large(nbytes, limits)
            if opening is not None:
                raise error
            async with self._database.write() as transaction:
                return Accepted(await self._ledger.reject(transaction, new.rejected(error)))
        ends = monotonic() + self._hold_seconds
        if project is None and (accepted := await self._accept_far(new, limits, opening)) is not None:
            return accepted
        outcome = await self._accept_near(new, opening, project)
        if not isinstance(outcome, _NoRoom):
            return outcome
        # One of the requests looks for room, and the next one after it: each look is a transaction.
        queue = self._waiting.setdefault((new.tenant, project), asyncio.Lock())
        try:
            await asyncio.wait_for(queue.acquire(), max(0.0, ends - monotonic()))
        except TimeoutError:
            raise TooManyOperations(_refusal(outcome.use)) from None
        try:
            return await self._accept_with_room(new, opening, project, ends)
        finally:
            queue.release()

    async def _accept_with_room(
        self, new: NewOperation, opening: Opening | None, project: str | None, ends: float
    ) -> Accepted:
        """Record ``new`` as soon as there is room for it. Raises ``TooManyOperations`` at ``ends``."""
        while isinstance(outcome := await self._accept_near(new, opening, project), _NoRoom):
            left = ends - monotonic()
            if left <= 0 or outcome.oldest is None or self._ledger.wakeups.is_closed:
                raise TooManyOperations(_refusal(outcome.use))
            await self._ledger.wait_until_final(new.tenant, outcome.oldest, seconds=min(left, _LOOK_SECONDS))
        return outcome

    async def _accept_far(self, new: NewOperation, limits: Limits, opening: Opening | None) -> Accepted | None:
        """Record ``new``, unless the tenant is near a limit then: return None."""
        most_operations = limits.pending_operations - _UNLOCKED
        most_bytes = limits.pending_bytes - _UNLOCKED * _UNLOCKED_BYTES
        if most_operations <= 0 or most_bytes <= 0 or new.payload.counted_bytes > _UNLOCKED_BYTES:
            return None
        async with self._database.write() as transaction:
            if opening is not None and (earlier := await opening(transaction)) is not None:
                return Accepted(earlier)
            accepted = await self._ledger.accept_counted(transaction, new, limits.pace(Meter.TRAIN))
            if accepted.operations <= most_operations and accepted.nbytes <= most_bytes:
                return accepted
            await undo(transaction)
            return None

    async def _accept_near(self, new: NewOperation, opening: Opening | None, project: str | None) -> Accepted | _NoRoom:
        """Record ``new`` if there is room for it, while no other request of the tenant is recorded."""
        lock = self._near.setdefault(new.tenant, asyncio.Lock())
        async with lock, self._database.write() as transaction:
            await hold_count(transaction, Counted.TRAINING, [new.tenant])
            use = await TRAINING_USE.of(transaction, new.tenant, self._defaults)
            full = await self._full(transaction, new, use, project)
            # An unload makes room, and each run has one at most.
            if full is not None and new.kind is not OperationKind.UNLOAD_MODEL:
                lane, seq_id = new.lane, new.seq_id
                earlier = await self._ledger.find(transaction, lane=lane, seq_id=seq_id, digest=new.digest)
                if earlier is not None:
                    return Accepted(earlier)
                if not await transaction.scalar(sql.CLOSES_GAP, {"lane": lane, "seq_id": seq_id}):
                    return full
            if opening is not None and (earlier := await opening(transaction)) is not None:
                return Accepted(earlier)
            return await self._ledger.accept_counted(transaction, new, use.limits.pace(Meter.TRAIN))

    async def _full(self, session: AsyncSession, new: NewOperation, use: Use, project: str | None) -> _NoRoom | None:
        """Return which limits leave no room for ``new``, None if there is room."""
        if _has_no_room(use, new):
            return _NoRoom(use, await session.scalar(sql.OLDEST_PENDING, {"tenant": new.tenant}))
        of_project = await use_of_project(session, new.tenant, project, PENDING_TRAINING)
        if project is not None and of_project is not None and _has_no_room(of_project, new):
            return _NoRoom(of_project, await oldest_pending(session, new.tenant, project))
        return None


def _has_no_room(use: Use | ProjectUse, new: NewOperation) -> bool:
    return use.room("pending_operations") < 1 or use.room("pending_bytes") < new.payload.counted_bytes


def _too_large(nbytes: int, limits: Limits) -> InvalidRequest:
    return InvalidRequest(
        f"this request takes {nbytes} bytes, and the limit for all pending training together is "
        f"{limits.pending_bytes}; send fewer or shorter sequences a request"
    )


def _refusal(use: Use | ProjectUse) -> str:
    again = "send this request again when some has been done"
    if isinstance(use, ProjectUse):
        full = [f"{use.used[name]} of {use.limits[name]} {_UNITS[name]}" for name in use.used]
        return f"pending training of project {use.name!r} takes {' and '.join(full)}; {again}"
    limits, used = use.limits, use.used
    return (
        f"pending training takes {used['pending_operations']} of {limits.pending_operations} operations and "
        f"{used['pending_bytes']} of {limits.pending_bytes} bytes; {again}"
    )
