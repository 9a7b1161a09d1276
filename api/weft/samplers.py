"""Endpoints of a live sampler's staleness bound: the number of versions that its samples may fall behind."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.authentication import GateKeeper, SampleReader
from api.json_body import PathId, json_body
from api.services import Services
from api.wire.request_model import RequestModel
from store.tables import Sampler
from tenants.samplers import OnStale, Staleness, bound_staleness, get_sampler, staleness_of

router = APIRouter(prefix="/samplers", tags=["samplers"])


class StalenessRequest(RequestModel):
    """A new bound: ``max_version_lag`` versions may be published after a sample's first token; null lifts the bound.

    ``on_stale`` says what happens to a sample that falls further behind.
    """

    max_version_lag: int | None = Field(ge=0, le=2**31 - 1)
    on_stale: OnStale = OnStale.FAIL


class StalenessInfo(BaseModel):
    """A sampler's bound, and the number of versions it has followed so far (``publications``)."""

    sampler_id: str
    max_version_lag: int | None
    on_stale: OnStale | None
    publications: int


@router.get("/{sampler_id}/staleness")
async def describe_staleness(caller: SampleReader, services: Services, sampler_id: PathId) -> StalenessInfo:
    """Describe the sampler's staleness bound. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        return _info(await get_sampler(session, caller.reach, sampler_id))


@router.post("/{sampler_id}/staleness")
async def set_staleness(
    caller: GateKeeper,
    services: Services,
    sampler_id: PathId,
    body: Annotated[StalenessRequest, json_body(StalenessRequest)],
) -> StalenessInfo:
    """Set the staleness bound of a live sampler; it holds for samples in flight, too.

    Raises ``NotFound``; ``InvalidRequest`` for a sampler that is pinned to one version.
    """
    bound = None if body.max_version_lag is None else Staleness(body.max_version_lag, body.on_stale)
    async with services.runtime.database.write() as transaction:
        return _info(await bound_staleness(transaction, caller.reach, sampler_id, bound))


def _info(sampler: Sampler) -> StalenessInfo:
    bound = staleness_of(sampler)
    return StalenessInfo(
        sampler_id=sampler.id,
        max_version_lag=bound.max_version_lag if bound else None,
        on_stale=bound.on_stale if bound else None,
        publications=sampler.publications,
    )
