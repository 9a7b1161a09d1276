"""Runs by the thousand, with points of the newest, written directly into a service's database."""

from datetime import timedelta

from sqlalchemy import insert

from contracts.losses import LossName
from store.clock import utc_now
from store.database import Database
from store.tables import Run, RunPoint, RunState
from tenants.run_points import LossPer
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import find_tenant

_RUNS_OF_SESSION = 100
_POINTS = 40
_WITH_POINTS = 500
_BATCH = 2000


async def fill(database: Database, tenant_name: str, base_model: str, count: int) -> None:
    """Give the tenant ``count`` runs, one a minute, and the newest of them points."""
    now = utc_now()
    async with database.read() as reading:
        tenant = await find_tenant(reading, name=tenant_name)
    for begin in range(0, count, _BATCH):
        numbers = range(begin, min(begin + _BATCH, count))
        async with database.write() as transaction:
            rows, points = [], []
            for number in numbers:
                if number % _RUNS_OF_SESSION == 0 or number == begin:
                    new = NewSession([f"fill {number}"], None, "0.38.0", None, None)
                    session = await create_session(transaction, tenant, new, utc_now)
                created = now - timedelta(minutes=count - number + 60)
                id = f"{session}:train:{number % _RUNS_OF_SESSION}"
                rows.append(_run(id, tenant, session, number, base_model, created))
                if number >= count - _WITH_POINTS:
                    points += [_point(id, tenant, step, created) for step in range(1, _POINTS + 1)]
            await transaction.execute(insert(Run), rows)
            if points:
                await transaction.execute(insert(RunPoint), points)


def _run(id: str, tenant: str, session: str, number: int, base_model: str, created: object) -> dict[str, object]:
    return {
        "id": id,
        "tenant_id": tenant,
        "session_id": session,
        "model_seq_id": number % _RUNS_OF_SESSION,
        "base_model": base_model,
        "rank": 8 << number % 3,
        "alpha": 32.0,
        "seed": number,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": True,
        "user_metadata": {"task": ("gsm8k", "chat", "code")[number % 3], "sweep": str(number // 50)},
        "state": RunState.UNLOADED,
        "next_seq_id": 2 * _POINTS + 1,
        "optimizer_steps": _POINTS,
        "created_at": created,
        "last_request_at": created,
    }


def _point(run: str, tenant: str, step: int, at: object) -> dict[str, object]:
    return {
        "run_id": run,
        "step": step,
        "tenant_id": tenant,
        "at": at,
        "loss_sum": 512.0 / step,
        "loss_weight": 256.0,
        "loss_per": LossPer.WEIGHT,
        "loss_fns": LossName.CROSS_ENTROPY,
        "tokens": 256,
        "sampling_kl_sum": 0.0,
        "sampled_tokens": 0,
        "learning_rate": 1e-4,
        "grad_norm": 1.0,
        "adapter_step": step,
    }
