"""Checkpoints that no run of theirs has saved: imported ones, and copies of others.

Each belongs to an ended run of its own, which says what base and settings it has.
"""

from dataclasses import dataclass

from sqlalchemy import or_, select, true, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound, SequenceConflict
from contracts.ids import CheckpointId, SessionId, TenantId
from contracts.operations import LoraSettings, OptimizerName
from contracts.paths import CheckpointPath, Segment
from store.clock import Clock
from store.tables import Checkpoint, Run, RunState, Session
from tenants.checkpoints import NewCheckpoint
from tenants.limits import Counted, Limits, hold_count
from tenants.reach import Owner, tenant_of
from tenants.runs import NewRun, insert_run, run_id_for
from tenants.sessions import NewSession, create_session, derived_session_id, get_session, live_session
from tenants.storage import store_checkpoint

_IMPORT = "weft import"


_COPY = "weft copy"
_COPIED_FROM = "copied_from"


@dataclass(frozen=True, slots=True)
class ImportedCheckpoint:
    """A written folder of an adapter, to be recorded."""

    id: CheckpointId
    base_model: str
    lora: LoraSettings
    segment: Segment
    name: str
    size_bytes: int
    ttl_seconds: int | None
    user_metadata: dict[str, str] | None = None
    optimizer: OptimizerName = OptimizerName.ADAMW
    run_metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CopyPlace:
    """Place of a copy: a run's slot of an open session, or a project, None for the tenant's default one."""

    session: SessionId | None = None
    model_seq_id: int = 0
    project: str | None = None
    key: str | None = None
    """Idempotency key of a copy without a slot, made up where the request has none."""
    opened_by: int | None = None
    """API key that the session of a copy without a slot is opened with."""

    @property
    def session_key(self) -> str:
        """Key under which the session of a copy without a slot is opened."""
        return f"copy/{self.project or ''}/{self.key}"


@dataclass(frozen=True, slots=True)
class CopySource:
    """Checkpoint that is copied. ``by_token``: a key of its tenant gave access to it."""

    checkpoint: CheckpointId
    path: CheckpointPath
    by_token: bool = False

    @property
    def run_metadata(self) -> dict[str, str]:
        """Metadata of the copy's run, by which a repeated request finds it."""
        return {_COPIED_FROM: str(self.path)}


async def import_session(
    transaction: AsyncSession,
    tenant: TenantId,
    name: str,
    clock: Clock,
    *,
    project: str | None = None,
    opened_by: int | None = None,
) -> SessionId:
    """Return the ended session of the import ``name``, made in ``project`` (None: the default one) if it is missing.

    ``opened_by``: API key of the import's request, None for an operator's import.
    """
    described = _new_session(_IMPORT, project, opened_by)
    return await _ended_session(transaction, tenant, described, f"import/{name}", clock)


async def record_import(
    transaction: AsyncSession,
    tenant: TenantId,
    new: ImportedCheckpoint,
    clock: Clock,
    defaults: Limits,
    *,
    session: SessionId | None = None,
) -> CheckpointPath:
    """Record the checkpoint and its run, which has ended. Return its path. Raises ``StorageFull``.

    ``session`` is the run's, of ``import_session``; None: a new one in the default project.
    """
    if session is None:
        # By the checkpoint's id: whoever records the same import again finds the same run.
        session = await import_session(transaction, tenant, new.id, clock)
    return await _record(transaction, tenant, session, 0, new, clock, defaults)


async def record_copy(
    transaction: AsyncSession,
    owner: Owner,
    new: ImportedCheckpoint,
    place: CopyPlace,
    source: CopySource,
    clock: Clock,
    defaults: Limits,
) -> tuple[CheckpointPath, bool]:
    """Record a copy as a run of its own, which has ended. Return its path, and False if that place has it already.

    Raises ``NotFound`` for the session, ``SessionEnded``, ``SequenceConflict`` for a slot with another run, ``StorageFull``.
    """
    tenant = tenant_of(owner)
    # Copies of one tenant are recorded one after the other.
    await hold_count(transaction, Counted.STORAGE, [tenant])
    if (earlier := await find_copy(transaction, owner, place, source.path)) is not None:
        return earlier, False
    # It may have been deleted, or its publication taken back, while its files were copied.
    allowed = [] if source.by_token else [or_(Checkpoint.tenant_id == tenant, Checkpoint.public == true())]
    if await transaction.scalar(select(Checkpoint.id).where(Checkpoint.id == source.checkpoint, *allowed)) is None:
        raise NotFound(f"no checkpoint {str(source.path)[:400]!r}")
    session = place.session
    if session is None:
        described = _new_session(_COPY, place.project, place.opened_by)
        session = await _ended_session(transaction, tenant, described, place.session_key, clock)
    else:
        await live_session(transaction, owner, session)
    return await _record(transaction, tenant, session, place.model_seq_id, new, clock, defaults), True


async def find_copy(
    session: AsyncSession, owner: Owner, place: CopyPlace, source: CheckpointPath
) -> CheckpointPath | None:
    """Return the path of the copy that an earlier request with the same place and source has made, None without one.

    Raises ``NotFound`` for a session that is not the owner's, ``SequenceConflict`` for a place with anything else.
    """
    tenant = tenant_of(owner)
    if place.session is not None:
        await get_session(session, owner, place.session)
    made_in = place.session or derived_session_id(tenant, place.session_key)
    run = await session.get(Run, run_id_for(made_in, place.model_seq_id))
    if run is None:
        return None
    if run.tenant_id != tenant or (run.user_metadata or {}).get(_COPIED_FROM) != str(source):
        used = (
            "this X-Idempotency-Key" if place.session is None else f"model_seq_id {place.model_seq_id} of this session"
        )
        raise SequenceConflict(f"{used} has made something else already; choose a new one")
    return CheckpointPath(run.id, source.segment, source.name)


def _new_session(kind: str, project: str | None, opened_by: int | None) -> NewSession:
    return NewSession([kind], None, sdk_version="", project=project, display_name=kind, key_id=opened_by)


async def _ended_session(
    transaction: AsyncSession, tenant: TenantId, described: NewSession, key: str, clock: Clock
) -> SessionId:
    session = await create_session(transaction, tenant, described, clock, idempotency_key=key)
    await transaction.execute(
        update(Session).where(Session.id == session).values(ended_at=clock(), end_reason="finished")
    )
    return session


async def _record(
    transaction: AsyncSession,
    tenant: TenantId,
    session: SessionId,
    model_seq_id: int,
    new: ImportedCheckpoint,
    clock: Clock,
    defaults: Limits,
) -> CheckpointPath:
    await hold_count(transaction, Counted.STORAGE, [tenant])
    described = NewRun(session, model_seq_id, new.base_model, new.lora, new.run_metadata, new.optimizer)
    if not await insert_run(transaction, tenant, described, clock):
        raise SequenceConflict(f"model_seq_id {model_seq_id} of this session is another run's; choose a new one")
    run = run_id_for(session, model_seq_id)
    await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.UNLOADED))
    checkpoint = NewCheckpoint(
        id=new.id,
        run_id=run,
        segment=new.segment,
        name=new.name,
        size_bytes=new.size_bytes,
        ttl_seconds=new.ttl_seconds,
        listed=True,
        user_metadata=new.user_metadata,
    )
    await store_checkpoint(transaction, tenant, checkpoint, clock, defaults)
    return CheckpointPath(run, new.segment, new.name)
