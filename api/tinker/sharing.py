"""Endpoints that share checkpoints: publish, take that back, and copy one into another session or project."""

import asyncio
from typing import Annotated
from uuid import uuid4

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel

from api.access_tokens import Access, readable
from api.acting import record_act
from api.admission import PATIENCE_SECONDS
from api.authentication import CheckpointWriter
from api.json_body import PathId, json_body
from api.services import ApiServices, Services
from api.shared_reads import Purpose, note_shared_read, shared_read
from api.tinker.checkpoints import address_of
from api.wire.request_model import PlainText, RequestModel
from api.wire.tinker_requests import SeqId, optimizer_of
from contracts.errors import FilesUnread, InvalidRequest, NotFound, StorageFull, Unavailable, WeftError
from contracts.ids import CheckpointId, SessionId
from contracts.paths import CheckpointPath, Segment, parse_path
from store.copied_folder import copy_folder
from store.tables import Checkpoint
from tenants.audit import session_of
from tenants.audit_actions import Action
from tenants.checkpoints import check_ttl, directory_of, new_checkpoint_id
from tenants.imported_checkpoints import CopyPlace, CopySource, ImportedCheckpoint, find_copy, record_copy
from tenants.limit_use import STORAGE_USE
from tenants.project_limits import check_rank_in, use_in_session, use_of_project
from tenants.projects import project_of_new
from tenants.rights import Principal
from tenants.runs import lora_settings
from tenants.sessions import check_client_key
from tenants.sharing import set_public

router = APIRouter(tags=["checkpoints"])

_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{segment}/{name}"
"""Both parts by themselves: a checkpoint may be named ``publish``, too."""


class CopyWeightsRequest(RequestModel):
    """Checkpoint to copy, and where to: a model's slot of a session, or a project, by default the key's own.

    ``weights_access_token`` is an API key of the checkpoint's tenant, where it is neither the caller's nor published.
    """

    source_path: PlainText
    session_id: PlainText | None = None
    model_seq_id: SeqId | None = None
    destination_project_id: PlainText | None = None
    ttl_seconds: int | None = None
    weights_access_token: PlainText | None = None


class CopiedWeights(BaseModel):
    """Path of the copy."""

    tinker_path: str


@router.post(_CHECKPOINT + "/publish", status_code=204)
async def publish(caller: CheckpointWriter, services: Services, run_id: PathId, segment: PathId, name: PathId) -> None:
    """Let every tenant sample, train from and copy the checkpoint. A repeat does nothing. Raises ``NotFound``."""
    await _set_public(services, caller, address_of(run_id, f"{segment}/{name}"), public=True)


@router.delete(_CHECKPOINT + "/publish", status_code=204)
async def unpublish(
    caller: CheckpointWriter, services: Services, run_id: PathId, segment: PathId, name: PathId
) -> None:
    """Take a publication back: other tenants' samplers of the checkpoint end with their next sample. Raises ``NotFound``."""
    await _set_public(services, caller, address_of(run_id, f"{segment}/{name}"), public=False)


@router.post("/copy_weights")
async def copy_weights(
    caller: CheckpointWriter,
    services: Services,
    request: Request,
    body: Annotated[CopyWeightsRequest, json_body(CopyWeightsRequest)],
    x_idempotency_key: Annotated[str | None, Header()] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> CopiedWeights:
    """Copy a checkpoint of the caller's, a published one, or one that an access token is for. The copy is the caller's own.

    A repeat with the same ``X-Idempotency-Key`` finds the first copy. Raises ``NotFound``, ``Forbidden``, ``StorageFull``,
    ``TooManyRequests`` beside other copies of the tenant's, ``SequenceConflict`` for a slot that another run has.
    """
    check_client_key(x_idempotency_key)
    if (body.session_id is None) != (body.model_seq_id is None):
        raise InvalidRequest("session_id and model_seq_id belong together; send both or neither")
    ttl_seconds = check_ttl(body.ttl_seconds)
    place = await _place(services, caller, body, x_idempotency_key or uuid4().hex)
    path = parse_path(body.source_path, field="source_path")
    async with services.runtime.database.read() as session:
        earlier = await find_copy(session, caller.reach, place, path)
    if earlier is not None:
        return CopiedWeights(tinker_path=str(earlier))
    access = Access(request, body.source_path, x_tinker_weights_access_token or body.weights_access_token)
    source_read = await readable(services, caller, access)
    found, run = source_read.checkpoint, source_read.run
    caller.check_base(run.base_model)
    await _check_rank(services, caller, place, run.rank)
    source = CopySource(CheckpointId(found.id), path, by_token=access.token is not None)
    new = ImportedCheckpoint(
        id=new_checkpoint_id(),
        base_model=run.base_model,
        lora=lora_settings(run),
        segment=Segment(found.segment),
        name=found.name,
        size_bytes=found.size_bytes,
        ttl_seconds=ttl_seconds,
        # What another tenant has noted of its checkpoint is not shared with it.
        user_metadata=found.user_metadata if found.tenant_id == caller.tenant else None,
        optimizer=optimizer_of(run.optimizer, "the checkpoint's optimizer"),
        run_metadata=source.run_metadata,
    )
    copies = services.admission.copies
    async with copies.held(caller.tenant, patience=PATIENCE_SECONDS, what="copies of checkpoints"):
        await _check_room(services, caller, found.size_bytes)
        # Counted before files are copied.
        services.admission.changes.count(caller.tenant)
        copied, is_new = await _copied(services, caller, new, place, source, found.directory)
    if is_new:
        note_shared_read(services, shared_read(caller, found.tenant_id, path, Purpose.COPY, source_read.holder))
    return CopiedWeights(tinker_path=str(copied))


async def _check_rank(services: ApiServices, caller: Principal, place: CopyPlace, rank: int) -> None:
    """Raise ``Forbidden`` for a rank beyond the bounds of the key, its tenant or the copy's project."""
    caller.check_rank(rank, services.limits_of(caller).max_rank)
    async with services.runtime.database.read() as session:
        if place.session is None:
            own = await use_of_project(session, caller.tenant, place.project, ())
        else:
            own = await use_in_session(session, caller.tenant, place.session, ())
    if own is not None:
        check_rank_in(own.name, own.limits, rank)


async def _check_room(services: ApiServices, caller: Principal, size: int) -> None:
    async with services.runtime.database.read() as session:
        room = (await STORAGE_USE.of(session, caller.tenant, services.limits)).room("stored_bytes")
    if size > room:
        raise StorageFull(f"the copy takes {size} bytes, and your storage has room for {max(room, 0)}")


async def _copied(
    services: ApiServices,
    caller: Principal,
    new: ImportedCheckpoint,
    place: CopyPlace,
    source: CopySource,
    directory: str,
) -> tuple[CheckpointPath, bool]:
    """Copy the files and record the copy. Return its path, and False if an earlier request has made it."""
    folder, clock = services.runtime.data_folder, services.runtime.clock
    target = directory_of(new.id)
    is_needless = False
    try:
        await asyncio.to_thread(copy_folder, folder.path(directory), folder.path(target))
        async with services.runtime.database.write() as transaction:
            path, is_new = await record_copy(transaction, caller.reach, new, place, source, clock, services.limits)
            is_needless = not is_new
            if is_new:
                told = {"copied_from": str(source.path), "size_bytes": new.size_bytes}
                of = session_of(path.run_id)
                await record_act(
                    transaction,
                    services,
                    caller,
                    Action.CHECKPOINT_CREATE,
                    str(path),
                    session_id=of,
                    after=told,
                    is_counted=True,
                )
    except Unavailable:
        # The copy may be recorded. If it is not, housekeeping removes the folder.
        raise
    except FileNotFoundError as gone:
        raise await _why_unseen(services, source) from gone
    except OSError as error:
        raise Unavailable("the data folder takes no more; send the request again later") from error
    except WeftError:
        is_needless = True
        raise
    finally:
        if is_needless:
            await asyncio.to_thread(folder.remove, target)
    return path, is_new


async def _why_unseen(services: ApiServices, source: CopySource) -> WeftError:
    """Return why files of the source cannot be seen: it was deleted, or its folder is away."""
    async with services.runtime.database.read() as session:
        if await session.get(Checkpoint, source.checkpoint) is None:
            return NotFound("the checkpoint was deleted meanwhile")
    return FilesUnread("the checkpoint's files cannot be read now; send the request again later")


async def _set_public(services: ApiServices, caller: Principal, path: CheckpointPath, *, public: bool) -> None:
    async with services.runtime.database.write() as transaction:
        await set_public(transaction, caller.reach, path, services.runtime.clock, public=public)
        action = Action.CHECKPOINT_PUBLISH if public else Action.CHECKPOINT_UNPUBLISH
        await record_act(transaction, services, caller, action, str(path), session_id=session_of(path.run_id))


async def _place(services: ApiServices, caller: Principal, body: CopyWeightsRequest, key: str | None) -> CopyPlace:
    if body.session_id is not None and body.model_seq_id is not None:
        return CopyPlace(session=SessionId(body.session_id), model_seq_id=body.model_seq_id)
    async with services.runtime.database.read() as session:
        project = await project_of_new(session, caller, body.destination_project_id)
    return CopyPlace(project=project, key=key, opened_by=caller.key_id)
