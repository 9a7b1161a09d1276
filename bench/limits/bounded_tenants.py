"""Limits of the benchmark's tenants, and runs that take work at once, written straight into the database."""

from collections.abc import Sequence

from sqlalchemy import update

from bench.workload import RANK
from contracts.ids import RunId
from contracts.operations import LoraSettings
from store.clock import utc_now
from store.database import Database, create_engine
from store.tables import Run, RunState
from tenants.budget_settings import BudgetName, set_budget
from tenants.budgets import Period
from tenants.keys import create_key
from tenants.limits import set_tenant
from tenants.project_limits import set_project_limits
from tenants.projects import create_project
from tenants.rights import KeyRights
from tenants.runs import NewRun
from tenants.sessions import NewSession, create_session
from tenants.suspensions import suspend_tenant
from tenants.tenant_names import find_tenant
from testing.runs import create_run

_BUDGET = 10**12


PROJECT = "slow"
"""Name of each tenant's project with a rate."""


async def bound(database_url: str, names: Sequence[str], *, a_minute: int, burst: int) -> None:
    """Give the tenants rates of both meters and a budget that is never spent."""
    database = Database(create_engine(database_url))
    for name in names:
        async with database.write() as transaction:
            await set_tenant(transaction, name=name, limits=_rates(a_minute, burst))
            tenant = await find_tenant(transaction, name=name)
            await set_budget(transaction, tenant, BudgetName(Period.MONTH), _BUDGET, utc_now())
    await database.close()


async def bound_parts(database_url: str, names: Sequence[str], *, a_minute: int, burst: int) -> list[str]:
    """Make a key and a project of each tenant, each with rates of both meters, and return the keys."""
    database, secrets, rates = Database(create_engine(database_url)), [], _rates(a_minute, burst)
    for name in names:
        async with database.write() as transaction:
            tenant = await find_tenant(transaction, name=name)
            rights = KeyRights(limits=rates)
            made = await create_key(transaction, tenant=tenant, note="slow", clock=utc_now, rights=rights)
            project = await create_project(transaction, tenant, PROJECT, utc_now)
            await set_project_limits(transaction, tenant, project.id, rates, utc_now)
            secrets.append(made.secret)
    await database.close()
    return secrets


def _rates(a_minute: int, burst: int) -> dict[str, int]:
    values = {"per_minute": a_minute, "burst": burst}
    return {f"{meter}_tokens_{name}": value for meter in ("train", "sample") for name, value in values.items()}


async def suspended_runs(
    database_url: str, names: Sequence[str], base_model: str, project: str | None = None
) -> list[RunId]:
    """Suspend the tenants and return a run of each: its work is accepted, and nothing of it is computed."""
    database, runs = Database(create_engine(database_url)), []
    for name in names:
        async with database.write() as transaction:
            await suspend_tenant(transaction, name=name, reason="the benchmark compares intakes", now=utc_now())
            await set_tenant(
                transaction,
                name=name,
                limits={"pending_operations": 10**9, "pending_bytes": 10**12, "seq_ahead": 10**9},
            )
            tenant = await find_tenant(transaction, name=name)
            inside = None if project is None else (await create_project(transaction, tenant, project, utc_now)).id
            session = await create_session(transaction, tenant, NewSession([], None, "bench", inside, None), utc_now)
            run = await create_run(
                transaction, tenant, NewRun(session, 0, base_model, LoraSettings(rank=RANK, seed=0), None), utc_now
            )
            await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.READY, next_seq_id=1))
            runs.append(run)
    await database.close()
    return runs
