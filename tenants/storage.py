"""Room of a tenant for stored bytes, its checkpoints and its training snapshots, and how long its checkpoints are kept."""

from collections.abc import Mapping
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import StorageFull
from contracts.ids import TenantId
from store.clock import Clock
from tenants.audit import session_of
from tenants.checkpoints import MAX_TTL, NewCheckpoint, let_expire, older_checkpoints, record_checkpoint
from tenants.limit_use import STORAGE_USE, Use
from tenants.limits import Limits, limits_of
from tenants.project_limits import ProjectUse, smaller, use_in_session, use_of_project

_STORED = ("stored_bytes", "checkpoints")


async def store_checkpoint(
    transaction: AsyncSession, tenant: TenantId, new: NewCheckpoint, clock: Clock, defaults: Limits
) -> None:
    """Record a checkpoint within the limits of the tenant's storage and its project's, and let checkpoints expire as they say.

    The transaction holds ``Counted.STORAGE``. Raises ``StorageFull``.
    """
    await record_checkpoint(transaction, tenant, new, clock)
    limits = await check_storage(transaction, tenant, defaults)
    project = await use_in_session(transaction, tenant, session_of(new.run_id), _STORED)
    _check_project(project, 0)
    if not new.listed:
        return
    own = {} if project is None else project.limits
    longest = _longest(limits, own)
    kept = smaller(limits.kept_checkpoints, own.get("kept_checkpoints"))
    if longest:
        await let_expire(transaction, [new.id], clock() + timedelta(seconds=longest))
    if kept:
        old = await older_checkpoints(transaction, new, clock(), keep=kept)
        await let_expire(transaction, old, clock())


async def longest_kept(session: AsyncSession, tenant: TenantId, session_id: str, defaults: Limits) -> int:
    """Return the seconds for which a checkpoint of that session may be kept at most, 0 for any time.

    By the limits of the tenant and of the session's project.
    """
    limits = await limits_of(session, tenant, defaults)
    project = await use_in_session(session, tenant, session_id, ())
    return _longest(limits, {} if project is None else project.limits)


def _longest(limits: Limits, own: Mapping[str, int]) -> int:
    longest = smaller(limits.checkpoint_seconds, own.get("checkpoint_seconds"))
    return min(longest, int(MAX_TTL.total_seconds()))


async def check_storage(session: AsyncSession, tenant: TenantId, defaults: Limits, *, coming: int = 0) -> Limits:
    """Return the tenant's limits. Raises ``StorageFull`` if its storage is beyond them with ``coming`` checkpoints more.

    Exact in a transaction that holds ``Counted.STORAGE``.
    """
    use = await STORAGE_USE.of(session, tenant, defaults)
    if use.room("stored_bytes") < coming or use.room("checkpoints") < coming:
        raise StorageFull(_refusal(use, coming))
    return use.limits


async def check_projects_storage(session: AsyncSession, tenant: TenantId, session_id: str, *, coming: int) -> None:
    """Raise ``StorageFull`` if the storage of the session's project has no room for ``coming`` checkpoints more."""
    _check_project(await use_in_session(session, tenant, session_id, _STORED), coming)


async def room_in_project(session: AsyncSession, tenant: TenantId, project: str | None) -> int | None:
    """Return how many bytes one more checkpoint of the project may have, None where it sets no limit of bytes.

    Raises ``StorageFull`` if there is no room for a checkpoint.
    """
    return _room_for_one(await use_of_project(session, tenant, project, _STORED))


async def room_in_session(session: AsyncSession, tenant: TenantId, session_id: str, defaults: Limits) -> int:
    """Return how many bytes one more checkpoint of the session may have, in its tenant's storage and in its project's.

    Raises ``StorageFull`` if the project has no room for a checkpoint.
    """
    of_tenant = (await STORAGE_USE.of(session, tenant, defaults)).room("stored_bytes")
    of_project = _room_for_one(await use_in_session(session, tenant, session_id, _STORED))
    return of_tenant if of_project is None else min(of_tenant, of_project)


def _room_for_one(use: ProjectUse | None) -> int | None:
    _check_project(use, 1)
    most = None if use is None else use.limits.get("stored_bytes")
    return None if use is None or most is None else most - use.used["stored_bytes"]


def _check_project(project: ProjectUse | None, coming: int) -> None:
    if project is not None and not all(project.has_room(name, coming=coming) for name in _STORED):
        raise StorageFull(_projects_refusal(project, coming))


def _projects_refusal(project: ProjectUse, coming: int) -> str:
    units = {"stored_bytes": ("bytes", 0), "checkpoints": ("checkpoints", coming)}
    parts = [
        f"{project.used[name] + more} of {project.limits[name]} {unit}"
        for name, (unit, more) in units.items()
        if name in project.limits
    ]
    return (
        f"project {project.name!r} has no room for this: its checkpoints and training snapshots would take "
        f"{' and '.join(parts)}; delete some, or set a TTL. Training goes on"
    )


def _refusal(use: Use, coming: int) -> str:
    limits, used = use.limits, use.used
    return (
        f"your storage has no room for this: checkpoints and training snapshots would take {used['stored_bytes']} of "
        f"{limits.stored_bytes} bytes and {used['checkpoints'] + coming} of {limits.checkpoints} checkpoints; delete some, or "
        "set a TTL. Training goes on"
    )
