"""Standing of a tenant: each of its limits, how much of it is used, and what happens beyond it."""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.tables import Tenant
from tenants.limit_use import ALL_USE
from tenants.limits import LIMIT_NAMES, Limits

_REASONS: Final = {
    "pending_operations": "a training request beyond it waits, then is answered 429 and sent again by the SDK",
    "pending_bytes": "a training request beyond it waits, then is answered 429 and sent again by the SDK",
    "seq_ahead": "a training request whose seq_id is farther ahead of its model fails",
    "open_runs": "a model beyond it is created when another is unloaded or its session ends",
    "sessions": "create_session beyond it is answered 429 until another session has ended",
    "stored_bytes": "a save beyond it fails; training goes on. Delete checkpoints or set a TTL",
    "checkpoints": "a save beyond it fails; training goes on. Delete checkpoints or set a TTL",
    "metadata_bytes": "user_metadata or tags that are larger are refused",
    "pending_samples": "asample beyond it is answered 429 and sent again by the SDK",
    "sample_tokens": "asample beyond it is answered 429 and sent again by the SDK",
    "session_samplers": "a sampler beyond it in one session is refused; another session takes it",
    "sample_record_bytes": "the oldest records of samples are forgotten; training that names one fails and says so",
    "run_metrics": "values of own metrics beyond it in one model are refused",
    "sample_work": "a sample with a larger num_samples x max_tokens x topk is refused",
}


@dataclass(frozen=True, slots=True)
class LimitStanding:
    """One limit. ``used`` is None for a limit of single requests. ``is_own``: the tenant has a value of its own."""

    name: str
    value: int
    used: int | None
    is_own: bool
    reason: str

    @property
    def is_reached(self) -> bool:
        """True when there is no room left."""
        return self.used is not None and self.used >= self.value


@dataclass(frozen=True, slots=True)
class Standing:
    """A tenant's share of passes, and its limits."""

    share: float
    limits: list[LimitStanding]


async def standing(session: AsyncSession, tenant: TenantId, defaults: Limits) -> Standing:
    """Return where ``tenant`` stands, counted as the limits are enforced."""
    use = await ALL_USE.of(session, tenant, defaults)
    row = (await session.execute(select(Tenant.share, Tenant.limits).where(Tenant.id == tenant))).one()
    values = use.limits.by_name()
    return Standing(
        share=row.share,
        limits=[
            LimitStanding(
                name=name,
                value=values[name],
                used=use.used.get(name),
                is_own=name in (row.limits or {}),
                reason=_REASONS[name],
            )
            for name in LIMIT_NAMES
        ],
    )
