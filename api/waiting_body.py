"""Bodies that tell why an operation waits, for tenants and for operators alike."""

from datetime import datetime

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RequestId
from contracts.waiting import Ahead, Wait, WaitReason
from ledger.inspection import front_of_run, refusing_budget
from ledger.waiting import Waits
from store.tables import Run


class AheadInfo(BaseModel):
    """Work before the operation: the tenant's own, its own tokens with it, and all others' as sums.

    - ``other_operations``, ``other_tokens``: rounded up to powers of two, and up to a second old.
    - ``bound_passes``: passes within which its sequences are in one. ``bound_tokens``: most tokens of others before it, less
      what they give back. Both hold for the tenants that have work now.
    - ``eta_seconds``: estimate from ``tokens_per_second``, the speed while this waits; null while it is not known.
    """

    own_operations: int
    own_tokens: int
    other_operations: int
    other_tokens: int
    bound_passes: int | None
    bound_tokens: int | None
    eta_seconds: float | None
    tokens_per_second: float | None


class WaitingInfo(BaseModel):
    """Wait of a run's next operation, or of a request. ``reason`` null: nothing waits.

    - ``request_id``: null for a run of which nothing is pending, whose client is refused new passes: its ``budget`` is spent.
    - ``cause``: reason of the operation of the run that comes first, if that is another; else ``reason``.
    - ``since``, ``until``: when the reason began, and when it ends at the latest if that is known.
    - ``seq_id``: number that is missing, or that comes first.
    - ``ahead``: null where no turn is waited for.
    """

    request_id: str | None = None
    reason: WaitReason | None = None
    cause: WaitReason | None = None
    text: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    seq_id: int | None = None
    ahead: AheadInfo | None = None


async def waiting_info(session: AsyncSession, waits: Waits, operation: RequestId) -> WaitingInfo:
    """Return why the operation waits, and what is before it."""
    wait = (await waits.of_all(session, [operation])).get(operation)
    if wait is None:
        return WaitingInfo()
    return waiting_body(operation, wait, await waits.ahead(session, operation, wait))


async def waiting_of_run(session: AsyncSession, waits: Waits, run: Run) -> WaitingInfo:
    """Return why the run's next operation waits, or its client, whose passes are refused."""
    front = await front_of_run(session, run)
    if front is not None:
        return await waiting_info(session, waits, front)
    now = waits.now()
    spent = await refusing_budget(session, run, now)
    if spent is None:
        return WaitingInfo()
    text = f"nothing is pending, and new passes are refused: {spent.told(now)}"
    return WaitingInfo(reason=WaitReason.BUDGET, cause=WaitReason.BUDGET, text=text, until=spent.ends(now))


def waiting_body(operation: str, wait: Wait, ahead: Ahead | None = None) -> WaitingInfo:
    """Return the body of a wait."""
    return WaitingInfo(
        request_id=operation,
        reason=wait.reason,
        cause=wait.cause,
        text=wait.text,
        since=wait.since,
        until=wait.until,
        seq_id=wait.seq_id,
        ahead=None if ahead is None else AheadInfo.model_validate(ahead, from_attributes=True),
    )
