"""Checkpoints: database rows, each for one immutable folder of saved weights.

The folders of deleted rows are discarded (``tenants.discarded_folders``).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import uuid4

from sqlalchemy import ColumnElement, bindparam, delete, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound
from contracts.ids import CheckpointId, RunId, TenantId
from contracts.paths import CheckpointPath, Segment
from store.batcher import few_lengths
from store.clock import Clock
from store.inserts import replacing_insert
from store.tables import Checkpoint, DeletedCheckpoint, Run
from tenants.discarded_folders import discard
from tenants.reach import Owner, check_lane, tenant_of, within

MAX_TTL = timedelta(days=3653)
_MOST_OLDER = 1000
"""Older checkpoints that one save lets expire."""


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """A written folder to be recorded. With ``ttl_seconds`` None it never expires."""

    id: CheckpointId
    run_id: RunId
    segment: Segment
    name: str
    size_bytes: int
    ttl_seconds: int | None
    listed: bool
    user_metadata: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class OwnedFolder:
    """Folder of a checkpoint, relative to the data folder, and its tenant."""

    directory: str
    tenant: TenantId


CHECKPOINTS, SNAPSHOTS = "checkpoints", "snapshots"
"""Parent folders, relative to the data folder."""

_IS_UNEXPIRED = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > bindparam("now"))
# Built once: every swap waits for both queries.
_AT_PATH = (
    select(Checkpoint, Run)
    .join(Run, Run.id == Checkpoint.run_id)
    .where(
        Checkpoint.tenant_id == bindparam("tenant"),
        Checkpoint.run_id == bindparam("run"),
        Checkpoint.segment == bindparam("segment"),
        Checkpoint.name == bindparam("name"),
        _IS_UNEXPIRED,
    )
)
_DELETED = (
    DeletedCheckpoint.tenant_id,
    DeletedCheckpoint.run_id,
    DeletedCheckpoint.segment,
    DeletedCheckpoint.name,
)
_BY_ID = select(Checkpoint).where(
    Checkpoint.id == bindparam("id"), Checkpoint.tenant_id == bindparam("tenant"), _IS_UNEXPIRED
)


def new_checkpoint_id() -> CheckpointId:
    """Return a fresh id. It also names the folder and the adapter version on replicas, so it is never reused."""
    return CheckpointId(uuid4().hex)


def directory_of(checkpoint: CheckpointId) -> str:
    """Return the checkpoint's folder, relative to the data folder."""
    return f"{CHECKPOINTS}/{checkpoint}"


def checkpoint_in(directory: str) -> CheckpointId:
    """Return the checkpoint of a folder: the inverse of ``directory_of``."""
    return CheckpointId(directory.rpartition("/")[2])


def check_ttl(ttl_seconds: int | None, field: str = "ttl_seconds") -> int | None:
    """Return ``ttl_seconds`` if it is None or allowed, else raise ``InvalidRequest`` naming ``field``."""
    if ttl_seconds is not None and not 0 < ttl_seconds <= MAX_TTL.total_seconds():
        raise InvalidRequest(
            f"{field} must be 1 to {int(MAX_TTL.total_seconds())} seconds, or null to keep; got {ttl_seconds}"
        )
    return ttl_seconds


def reached(owner: Owner) -> list[ColumnElement[bool]]:
    """Return the conditions under which checkpoints of the owner's tenant are in the owner's projects."""
    runs = within(owner, Run.session_id)
    return [Checkpoint.run_id.in_(select(Run.id).where(*runs))] if runs else []


def is_unexpired(now: datetime) -> ColumnElement[bool]:
    """Return the condition on checkpoints that have not expired."""
    return or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > now)


def path_of(checkpoint: Checkpoint) -> CheckpointPath:
    """Return the checkpoint's ``tinker://`` address."""
    return CheckpointPath(checkpoint.run_id, Segment(checkpoint.segment), checkpoint.name)


async def record_checkpoint(transaction: AsyncSession, tenant: TenantId, new: NewCheckpoint, clock: Clock) -> None:
    """Insert the row in place of one with the same address, whose folder is discarded."""
    now = clock()
    address = (
        Checkpoint.run_id == new.run_id,
        Checkpoint.segment == new.segment,
        Checkpoint.name == new.name,
        Checkpoint.tenant_id == tenant,
    )
    await discard(transaction, list(await transaction.scalars(select(Checkpoint.id).where(*address))), now)
    transaction.add(
        Checkpoint(
            id=new.id,
            tenant_id=tenant,
            run_id=new.run_id,
            segment=new.segment,
            name=new.name,
            directory=directory_of(new.id),
            size_bytes=new.size_bytes,
            listed=new.listed,
            public=False,
            user_metadata=new.user_metadata,
            created_at=now,
            expires_at=None if new.ttl_seconds is None else now + timedelta(seconds=new.ttl_seconds),
        )
    )
    await transaction.flush()


async def let_expire(transaction: AsyncSession, checkpoints: Collection[str], at: datetime) -> None:
    """Let the checkpoints expire at that time, unless they expire before."""
    later = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > at)
    if checkpoints:
        await transaction.execute(
            update(Checkpoint)
            .where(Checkpoint.id.in_(checkpoints), later)
            .values(expires_at=at)
            .execution_options(synchronize_session=False)
        )


async def older_checkpoints(session: AsyncSession, new: NewCheckpoint, now: datetime, *, keep: int) -> Sequence[str]:
    """Return the unexpired checkpoints with a name of the same run and segment, without the newest ``keep``."""
    rows = await session.scalars(
        select(Checkpoint.id)
        .where(
            Checkpoint.run_id == new.run_id,
            Checkpoint.segment == new.segment,
            Checkpoint.listed.is_(True),
            is_unexpired(now),
        )
        # The new one may be of the same microsecond as another.
        .order_by((Checkpoint.id == new.id).desc(), Checkpoint.created_at.desc(), Checkpoint.id.desc())
        .offset(keep)
        .limit(_MOST_OLDER)
    )
    return rows.all()


async def find_checkpoint(
    session: AsyncSession, owner: Owner, path: CheckpointPath, clock: Clock
) -> tuple[Checkpoint, Run]:
    """Return the owner's unexpired checkpoint at ``path`` and its run. Raises ``NotFound``."""
    keys = {"tenant": tenant_of(owner), "run": path.run_id, "segment": path.segment, "name": path.name, "now": clock()}
    row = (await session.execute(_AT_PATH, keys)).one_or_none()
    missing = NotFound(f"no checkpoint {str(path)[:400]!r}")
    if row is None:
        raise missing
    await check_lane(session, owner, row[1].id, missing)
    return row[0], row[1]


async def checkpoint_folder(session: AsyncSession, path: CheckpointPath) -> OwnedFolder:
    """Return any tenant's checkpoint folder; for operators only. Raises ``NotFound``."""
    found = await session.execute(
        select(Checkpoint.directory, Checkpoint.tenant_id).where(
            Checkpoint.run_id == path.run_id, Checkpoint.segment == path.segment, Checkpoint.name == path.name
        )
    )
    if (row := found.one_or_none()) is None:
        raise NotFound(f"no checkpoint {str(path)[:400]!r}")
    return OwnedFolder(row.directory, TenantId(row.tenant_id))


async def get_checkpoint(session: AsyncSession, tenant: TenantId, checkpoint_id: str, clock: Clock) -> Checkpoint:
    """Return the tenant's unexpired checkpoint by row id. Raises ``NotFound``."""
    found = await session.scalar(_BY_ID, {"tenant": tenant, "id": checkpoint_id, "now": clock()})
    if found is None:
        raise NotFound("the checkpoint was deleted or has expired; make a sampler from another")
    return found


async def newest_sampler_checkpoint(session: AsyncSession, tenant: TenantId, run: RunId, clock: Clock) -> CheckpointId:
    """Return the run's newest sampler weights, listed or not. Raises ``NotFound``."""
    found = await session.scalar(
        select(Checkpoint.id)
        .where(
            Checkpoint.run_id == run,
            Checkpoint.tenant_id == tenant,
            Checkpoint.segment == Segment.SAMPLER_WEIGHTS,
            is_unexpired(clock()),
        )
        .order_by(Checkpoint.created_at.desc(), Checkpoint.id.desc())
        .limit(1)
    )
    if found is None:
        raise NotFound(f"run {run[:150]!r} has no sampler weights yet: save_weights_for_sampler makes them")
    return CheckpointId(found)


async def sampled_runs(session: AsyncSession, tenant: TenantId, runs: Collection[str], clock: Clock) -> set[str]:
    """Return those of the tenant's runs that have sampler weights, listed or not."""
    found = await session.scalars(
        select(Checkpoint.run_id)
        .where(
            Checkpoint.run_id.in_(few_lengths(sorted(runs))),
            Checkpoint.tenant_id == tenant,
            Checkpoint.segment == Segment.SAMPLER_WEIGHTS,
            is_unexpired(clock()),
        )
        .distinct()
    )
    return set(found)


async def delete_checkpoint(transaction: AsyncSession, owner: Owner, path: CheckpointPath, clock: Clock) -> bool:
    """Delete the row, discard its folder and remember the deletion. Return False for a repeat of a remembered deletion.

    Raises ``NotFound``.
    """
    address = {"tenant_id": tenant_of(owner), "run_id": path.run_id, "segment": path.segment, "name": path.name}
    try:
        found, _ = await find_checkpoint(transaction, owner, path, clock)
    except NotFound as missing:
        await check_lane(transaction, owner, path.run_id, missing)
        if await transaction.get(DeletedCheckpoint, address) is None:
            raise
        return False
    transaction.expunge(found)
    rows = await discard(transaction, [found.id], clock())
    await transaction.execute(replacing_insert(transaction, DeletedCheckpoint), {**address, "deleted_at": clock()})
    return rows == 1


async def delete_checkpoints(
    transaction: AsyncSession, owner: Owner, paths: Collection[CheckpointPath], clock: Clock
) -> list[CheckpointPath]:
    """Delete those of the checkpoints that the owner has, as ``delete_checkpoint`` does; return the paths of the others."""
    tenant, now = tenant_of(owner), clock()
    addresses = sorted({(path.run_id, path.segment.value, path.name) for path in paths})
    at = tuple_(Checkpoint.run_id, Checkpoint.segment, Checkpoint.name)
    found = list(
        await transaction.execute(
            select(Checkpoint.id, Checkpoint.run_id, Checkpoint.segment, Checkpoint.name)
            .where(Checkpoint.tenant_id == tenant, *reached(owner), at.in_(addresses))
            .order_by(Checkpoint.id)
        )
    )
    await discard(transaction, [row.id for row in found], now)
    deletions = [
        {"tenant_id": tenant, "run_id": row.run_id, "segment": row.segment, "name": row.name, "deleted_at": now}
        for row in found
    ]
    if deletions:
        await transaction.execute(replacing_insert(transaction, DeletedCheckpoint), deletions)
    gone = {(row.run_id, row.segment, row.name) for row in found}
    return [path for path in paths if (path.run_id, path.segment.value, path.name) not in gone]


async def forget_deletions(transaction: AsyncSession, *, before: datetime, most: int) -> int:
    """Forget at most ``most`` deletions that were done before ``before``; return how many."""
    gone = await transaction.execute(
        delete(DeletedCheckpoint)
        .where(
            tuple_(*_DELETED).in_(
                select(*_DELETED)
                .where(DeletedCheckpoint.deleted_at < before)
                .order_by(DeletedCheckpoint.deleted_at)
                .limit(most)
            )
        )
        .returning(DeletedCheckpoint.name)
        .execution_options(synchronize_session=False)
    )
    return len(gone.all())


async def is_path_taken(session: AsyncSession, tenant: TenantId, path: CheckpointPath) -> bool:
    """Return whether the tenant has a checkpoint at ``path``, expired or not."""
    found = await session.scalar(
        select(Checkpoint.id).where(
            Checkpoint.tenant_id == tenant,
            Checkpoint.run_id == path.run_id,
            Checkpoint.segment == path.segment,
            Checkpoint.name == path.name,
        )
    )
    return found is not None
