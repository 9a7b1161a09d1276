"""``/v1/models``: every name that a tenant may send as ``model``, and the weights that a name stands for."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession

from api.authentication import SampleReader
from api.json_body import PathId
from api.openai.errors import OpenAiRoute
from api.services import ApiServices, Services
from contracts.errors import NotFound
from contracts.ids import CheckpointId, RunId, TenantId
from contracts.paths import Segment, parse_path
from store.sampled_bases import check_can_be_sampled
from store.tables import Run
from tenants.audit_log import ANOTHER_TENANT
from tenants.checkpoint_lists import CheckpointFilter, list_checkpoints
from tenants.checkpoints import path_of, sampled_runs
from tenants.followed_versions import followed_version
from tenants.rights import Principal
from tenants.runs import get_run, list_runs
from tenants.sharing import find_readable
from tenants.tenant_names import tenant_name

router = APIRouter(tags=["openai"], route_class=OpenAiRoute)

SESSION = "openai"
"""Name of the tenant's standing session, which holds the samplers of these endpoints."""
_MOST_LISTED = 1000


@dataclass(frozen=True, slots=True)
class NamedModel:
    """Meaning of a name sent as ``model``.

    - A ``tinker://`` path: ``path`` and ``version`` are set, and the version never changes. ``shared_by``: its tenant.
    - A run's id: ``run`` is set, and ``version`` is the one that its samplers follow now.
    - A served base model: neither is set.

    ``created_at``: when the checkpoint or the run was made, None for a base.
    """

    name: str
    base_model: str
    version: CheckpointId | None = None
    path: str | None = None
    run: RunId | None = None
    shared_by: TenantId | None = None
    created_at: datetime | None = None


def _sampled(services: ApiServices, run: Run) -> str:
    """Return the run's base model. Raises ``UnknownBaseModel``, and ``InvalidRequest`` if no sampler takes its adapter."""
    facts = services.base(run.base_model)
    check_can_be_sampled(services.runtime.settings, facts, rank=run.rank, trains_head=run.train_unembed)
    return facts.name


async def named_model(services: ApiServices, caller: Principal, name: str) -> NamedModel:
    """Return the meaning of ``name`` for the caller. Raises ``NotFound``, ``InvalidRequest``, ``UnknownBaseModel``."""
    if name in services.bases:
        return NamedModel(name, name)
    async with services.runtime.database.read() as session:
        if name.startswith("tinker://"):
            path = parse_path(name, segment=Segment.SAMPLER_WEIGHTS, field="model")
            checkpoint, run = await find_readable(session, caller.reach, path, services.runtime.clock)
            base = _sampled(services, run)
            owner = TenantId(checkpoint.tenant_id)
            version, made = CheckpointId(checkpoint.id), checkpoint.created_at
            return NamedModel(name, base, version=version, path=str(path), shared_by=owner, created_at=made)
        try:
            run = await get_run(session, caller.reach, name)
        except NotFound:
            raise NotFound(
                f"no model {name[:300]!r}: name a tinker:// path of sampler weights, a run's id or a served base model; "
                "GET /v1/models lists them"
            ) from None
        run_id = RunId(run.id)
        version = await version_of_run(services, session, caller, run_id)
        return NamedModel(name, _sampled(services, run), version=version, run=run_id, created_at=run.created_at)


async def version_of_run(services: ApiServices, session: AsyncSession, caller: Principal, run: RunId) -> CheckpointId:
    """Return the version that the caller's samplers of the run follow now. Raises ``NotFound`` without sampler weights."""
    return await followed_version(session, caller.tenant, run, services.runtime.clock)


@router.get("/models")
async def list_models(caller: SampleReader, services: Services) -> dict[str, Any]:
    """List the served base models, those of the caller's newest runs that can be sampled, and its newest checkpoints.

    A run or a checkpoint of a base that is not served cannot be sampled and is left out.
    """
    async with services.runtime.database.survey() as session:
        runs, _ = await list_runs(session, caller.reach, limit=_MOST_LISTED, offset=0, bases=services.bases)
        sampled = await sampled_runs(session, caller.tenant, [run.id for run in runs], services.runtime.clock)
        which = CheckpointFilter(
            caller.reach, services.runtime.clock(), (Segment.SAMPLER_WEIGHTS,), bases=services.bases
        )
        checkpoints = await list_checkpoints(session, which, limit=_MOST_LISTED)
        owner = await tenant_name(session, caller.tenant)
    found = [_model(name, "weft", 0) for name in services.bases]
    found += [_model(run.id, owner, int(run.created_at.timestamp())) for run in runs if run.id in sampled]
    found += [
        _model(str(path_of(checkpoint)), owner, int(checkpoint.created_at.timestamp())) for checkpoint in checkpoints
    ]
    return {"object": "list", "data": found}


@router.get("/models/{name:path}")
async def describe_model(caller: SampleReader, services: Services, name: PathId) -> dict[str, Any]:
    """Describe one model by its name. Raises ``NotFound``."""
    found = await named_model(services, caller, name)
    if found.created_at is None:
        return _model(found.name, "weft", 0)
    created = int(found.created_at.timestamp())
    if found.shared_by not in (None, caller.tenant):
        return _model(found.name, ANOTHER_TENANT, created)
    async with services.runtime.database.read() as session:
        return _model(found.name, await tenant_name(session, caller.tenant), created)


def _model(name: str, owner: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}
