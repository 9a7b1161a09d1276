"""Training runs: one adapter each."""

from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from engine.contracts.errors import NotFound, RunUnloaded, SessionEnded
from engine.contracts.ids import RunId, SessionId, TenantId
from engine.contracts.operations import LoraSettings
from tenants.clock import Clock
from tenants.database import insert_unless_present
from tenants.models import Run, RunState, Session


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to be; ``lora.seed`` is resolved (never None)."""

    session_id: SessionId
    model_seq_id: int
    base_model: str
    lora: LoraSettings
    user_metadata: dict[str, str] | None


def run_id_for(session_id: str, model_seq_id: int) -> RunId:
    """The id that SDK 0.38 derives by itself (CONTRACT.md section 0.4)."""
    return RunId(f"{session_id}:train:{model_seq_id}")


async def create_run(transaction: AsyncSession, tenant: TenantId, new: NewRun, clock: Clock) -> RunId:
    """Insert the run's row, state ``creating``, unless it is there; its create operation is seq 0 of its lane."""
    now = clock()
    if new.lora.seed is None:
        raise ValueError("resolve the seed first")
    run_id = run_id_for(new.session_id, new.model_seq_id)
    values = {
        "id": run_id,
        "tenant_id": tenant,
        "session_id": new.session_id,
        "model_seq_id": new.model_seq_id,
        "base_model": new.base_model,
        "rank": new.lora.rank,
        "alpha": new.lora.alpha,
        "seed": new.lora.seed,
        "train_attn": new.lora.train_attn,
        "train_mlp": new.lora.train_mlp,
        "train_unembed": new.lora.train_unembed,
        "user_metadata": new.user_metadata,
        "state": RunState.CREATING,
        "next_seq_id": 0,
        "snapshot_seq_id": -1,
        "created_at": now,
        "last_request_at": now,
    }
    await transaction.execute(insert_unless_present(transaction, Run).values(values))
    return run_id


def lora_settings(run: Run) -> LoraSettings:
    """The adapter's settings as recorded, seed resolved."""
    return LoraSettings(
        rank=run.rank,
        alpha=run.alpha,
        seed=run.seed,
        train_attn=run.train_attn,
        train_mlp=run.train_mlp,
        train_unembed=run.train_unembed,
    )


async def get_run(session: AsyncSession, tenant: TenantId, run_id: str) -> Run:
    """The tenant's run, whatever its state. Raises ``NotFound``."""
    found = await session.scalar(select(Run).where(Run.id == run_id, Run.tenant_id == tenant))
    if found is None:
        raise NotFound(f"no model {run_id[:150]!r}")
    return found


async def check_open(session: AsyncSession, tenant: TenantId, run_id: str) -> None:
    """Raise ``NotFound``, ``RunUnloaded`` or ``SessionEnded`` unless the tenant's run can take work."""
    query = (
        select(Run.state, Session.ended_at, Session.end_reason)
        .join(Session, Session.id == Run.session_id)
        .where(Run.id == run_id, Run.tenant_id == tenant)
    )
    row = (await session.execute(query)).one_or_none()
    if row is None:
        raise NotFound(f"no model {run_id[:150]!r}")
    if row.state == RunState.UNLOADED:
        raise RunUnloaded(f"model {run_id} was unloaded; create another, or load a checkpoint of it")
    if row.state == RunState.FAILED:
        raise RunUnloaded(f"model {run_id} was never made: its creation failed")
    if row.ended_at is not None:
        raise SessionEnded(f"the session of model {run_id} has ended ({row.end_reason}); open a new one")


async def touch_run(transaction: AsyncSession, tenant: TenantId, run_id: str, clock: Clock) -> None:
    """Note a request for the run."""
    await transaction.execute(
        update(Run).where(Run.id == run_id, Run.tenant_id == tenant).values(last_request_at=clock())
    )


async def list_runs(session: AsyncSession, tenant: TenantId, *, limit: int, offset: int) -> tuple[list[Run], int]:
    """A page of the tenant's runs, newest first, and how many there are."""
    owned = Run.tenant_id == tenant
    total = await session.scalar(select(func.count()).select_from(Run).where(owned)) or 0
    page = select(Run).where(owned).order_by(Run.created_at.desc(), Run.id).limit(limit).offset(offset)
    return list(await session.scalars(page)), total
