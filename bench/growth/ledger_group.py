"""The ledger's calls that ``bench.ledger`` does not time: answers to repeats, ends from outside, and operators' questions."""

from datetime import timedelta
from functools import partial

from sqlalchemy.ext.asyncio import AsyncSession

from bench.growth.calls import Named, Within, Years
from bench.ledger.calls import LedgerCalls
from bench.ledger.rows import BASE_MODEL, LEASE, a_batch
from contracts.codec import pack, request_digest
from contracts.errors import Cancelled, InvalidRequest, SessionEnded
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import NewOperation, OperationState, StoredPayload
from contracts.operations import OperationKind
from ledger import statements as sql
from ledger.attempts import count_attempts
from ledger.cancellation import (
    OfEndedKeys,
    OfEndedSessions,
    OfKeys,
    OfLane,
    OfOperation,
    OfSession,
    OfTenant,
    Selection,
)
from ledger.inspection import OperationFilter, count_pending, inspect_operation, list_operations
from ledger.pruning import drop_covered_payloads
from ledger.requeue import requeue_operation
from ledger.waiting import Waits
from store.clock import utc_now
from store.data_folder import DataFolder
from store.settings import Settings
from tenants.keys import keys_ended_between

_SHOWN = 50
"""Operations that `weft operation list` shows by default."""
_NEVER = 2**40
"""A seq_id that no operation has."""


def ledger_group(calls: LedgerCalls, years: Years) -> tuple[Named, Named]:
    """Return the reading and the writing calls of the ledger."""
    ledger, pending = calls.ledger, _Pending(calls)
    settings = Settings()
    waits = Waits(calls.database, settings, DataFolder(settings.data_dir), utc_now)

    async def find(session: AsyncSession) -> None:
        _, run, seq_id = years.active
        await session.execute(sql.FIND, {"lane": run, "seq_id": seq_id - 1})

    async def result(session: AsyncSession) -> None:
        tenant, operation = years.finished
        await session.execute(sql.RESULT, {"operation_id": operation, "tenant": tenant})

    async def inspect(session: AsyncSession) -> None:
        await inspect_operation(session, years.finished[1], waits=waits)

    async def why_all_wait(session: AsyncSession) -> None:
        found = await list_operations(session, OperationFilter(), most=_SHOWN, waits=waits)
        for one in found[:2]:
            if one.wait is not None:
                await waits.ahead(session, one.id, one.wait)

    async def fail_pending(transaction: AsyncSession) -> None:
        await ledger.fail_pending(transaction, years.waiting, SessionEnded("the session has ended"), unloads=True)

    async def requeue(transaction: AsyncSession) -> None:
        await requeue_operation(transaction, await pending.one(transaction))

    async def cancel_operation(transaction: AsyncSession) -> None:
        await _cancel(calls, OfOperation(await pending.one(transaction)), transaction)

    async def count_attempt(transaction: AsyncSession) -> None:
        await count_attempts(transaction, [await pending.one(transaction)])

    reads: dict[str, Within] = {
        "find": find,
        "result": result,
        "ended": lambda session: ledger.ended(session, [years.finished[1] for _ in range(16)]),
        "leases": lambda session: ledger.leases(session, [years.active[1] for _ in range(16)]),
        "closes_gap": lambda session: session.execute(sql.CLOSES_GAP, {"lane": years.active[1], "seq_id": _NEVER}),
        "oldest_pending": lambda session: session.execute(sql.OLDEST_PENDING, {"tenant": years.tenant}),
        "ended_keys": lambda session: keys_ended_between(session, utc_now() - timedelta(hours=1), utc_now()),
        "inspect_operation": inspect,
        "why_all_wait": why_all_wait,
        "count_pending": lambda session: count_pending(session, years.waiting),
        **{f"list_{name}": partial(_list, chosen=chosen, waits=waits) for name, chosen in _LISTS.items()},
    }
    writes: dict[str, Within] = {
        "reject": lambda transaction: ledger.reject(transaction, _new(years).rejected(InvalidRequest("too large"))),
        "claimed": lambda transaction: ledger.claimed(transaction, [years.finished[1]], process="a pool"),
        "fail_pending": fail_pending,
        "requeue": requeue,
        "count_attempts": count_attempt,
        "drop_payloads": drop_covered_payloads,
        "cancel_operation": cancel_operation,
        "cancel_run": lambda transaction: _cancel(calls, OfLane(years.waiting), transaction),
        "cancel_sampler": lambda transaction: _cancel(calls, OfLane(years.live_sampler[1]), transaction),
        "cancel_session": lambda transaction: _cancel(calls, OfSession(years.live_session), transaction),
        "cancel_tenant": lambda transaction: _cancel(calls, OfTenant(years.tenant), transaction),
        "cancel_key": lambda transaction: _cancel(calls, OfKeys(years.tenant, [1]), transaction),
        "cancel_ended_sessions": lambda transaction: _cancel(calls, OfEndedSessions(), transaction),
        "cancel_ended_keys": lambda transaction: _cancel(calls, OfEndedKeys(utc_now()), transaction),
    }
    return reads, writes


_LISTS = {
    "pending": OperationFilter(),
    "pending_of_tenant": OperationFilter(tenant="tenant1"),
    "pending_of_nobody": OperationFilter(tenant="nobody"),
    "pending_samples": OperationFilter(kind=OperationKind.SAMPLE),
    "done": OperationFilter(OperationState.DONE),
    "done_of_nobody": OperationFilter(OperationState.DONE, tenant="nobody"),
    "done_of_rare_kind": OperationFilter(OperationState.DONE, kind=OperationKind.LOAD_WEIGHTS),
    "failed": OperationFilter(OperationState.FAILED),
    "failed_of_tenant": OperationFilter(OperationState.FAILED, tenant="tenant1"),
    "failed_of_nobody": OperationFilter(OperationState.FAILED, tenant="nobody"),
    "done_of_run": OperationFilter(OperationState.DONE, lane=f"{0xABCDEF:032x}:train:1"),
}
"""Lists of operations. Tenant "nobody" has none, so whatever walks over others' rows walks over all of them."""


async def _list(session: AsyncSession, *, chosen: OperationFilter, waits: Waits) -> None:
    await list_operations(session, chosen, most=_SHOWN, waits=waits)


async def _cancel(calls: LedgerCalls, selection: Selection, transaction: AsyncSession) -> None:
    await calls.ledger.cancel(transaction, selection, Cancelled("cancelled by an operator"))


class _Pending:
    """Ids of pending training operations, read at the first call."""

    def __init__(self, calls: LedgerCalls) -> None:
        self._calls = calls
        self._ids: list[RequestId] = []
        self._asked = 0

    async def one(self, session: AsyncSession) -> RequestId:
        """Return a pending operation."""
        if not self._ids:
            found = await self._calls.ledger.pending_training(
                session, BASE_MODEL, trainer=LEASE.trainer, after_position=0
            )
            self._ids = [operation.id for operation in found]
        self._asked += 1
        return self._ids[self._asked % len(self._ids)]


def _new(years: Years) -> NewOperation:
    tenant, run, _ = years.active
    packed, kind = pack(a_batch()), OperationKind.FORWARD_BACKWARD
    return NewOperation(
        TenantId(tenant), run, _NEVER, kind, BASE_MODEL, StoredPayload(packed), _digest(), trainer=LEASE.trainer
    )


def _digest() -> bytes:
    return request_digest(OperationKind.FORWARD_BACKWARD, pack(a_batch()))
