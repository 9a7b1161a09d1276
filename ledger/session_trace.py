"""The timeline of a session: when each of its operations was accepted, and when it ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from contracts.ids import TenantId
from store.tables import Operation, Run, Sampler

MOST_TRACED = 2_000
"""Operations of one trace: the newest. Their rows are read on the event loop."""
_FIRST = -(2**31)
"""Below every seq_id."""


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """An operation on the timeline. ``finished_at`` is None while it is pending."""

    id: str
    lane: str
    seq_id: int
    kind: str
    state: str
    tokens: int
    created_at: datetime
    finished_at: datetime | None
    error_code: str | None


async def session_trace(
    session: AsyncSession, tenant: TenantId, session_id: str, *, most: int = MOST_TRACED
) -> Sequence[TracedOperation]:
    """Return the newest ``most`` operations of the session's runs and samplers that are still recorded, oldest first."""
    runs = select(Run.id).where(Run.session_id == session_id, Run.tenant_id == tenant)
    samplers = select(Sampler.id).where(Sampler.session_id == session_id, Sampler.tenant_id == tenant)
    lanes = runs.union_all(samplers).subquery()
    # Of each lane no more are read than can be among the newest: a long run has millions, and each takes a step of the loop.
    behind = aliased(Operation)
    oldest = (
        select(behind.seq_id)
        .where(behind.lane == lanes.c.id)
        .order_by(behind.seq_id.desc())
        .offset(most - 1)
        .limit(1)
        .correlate(lanes)
        .scalar_subquery()
    )
    rows = await session.execute(
        select(
            Operation.id,
            Operation.lane,
            Operation.seq_id,
            Operation.kind,
            Operation.state,
            Operation.tokens,
            Operation.created_at,
            Operation.finished_at,
            Operation.error_code,
        )
        .join(lanes, Operation.lane == lanes.c.id)
        .where(Operation.tenant_id == tenant, Operation.seq_id >= func.coalesce(oldest, _FIRST))
        .order_by(Operation.position.desc())
        .limit(most)
    )
    return [TracedOperation(*row) for row in rows][::-1]
