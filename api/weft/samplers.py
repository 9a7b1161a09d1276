"""weft's own API over a live sampler: how old its samples may become."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.services import Caller, Services
from api.wire.json_body import PathId, RequestModel, json_body
from store.tables import Sampler
from tenants.samplers import OnStale, Staleness, bound_staleness, get_sampler, staleness_of

router = APIRouter(prefix="/samplers", tags=["samplers"])


class StalenessRequest(RequestModel):
    """``max_version_lag``: versions published since a sample's first token that it may have missed; null lifts the bound."""

    max_version_lag: int | None = Field(ge=0, le=2**31 - 1)
    on_stale: OnStale = OnStale.FAIL


class StalenessInfo(BaseModel):
    """The bound, and how many versions the sampler has followed."""

    sampler_id: str
    max_version_lag: int | None
    on_stale: OnStale | None
    publications: int


@router.get("/{sampler_id}/staleness")
async def describe_staleness(caller: Caller, services: Services, sampler_id: PathId) -> StalenessInfo:
    """The sampler's bound. Raises ``NotFound``."""
    async with services.database.read() as session:
        return _info(await get_sampler(session, caller, sampler_id))


@router.post("/{sampler_id}/staleness")
async def set_staleness(
    caller: Caller,
    services: Services,
    sampler_id: PathId,
    body: Annotated[StalenessRequest, json_body(StalenessRequest)],
) -> StalenessInfo:
    """Bound the samples of a live sampler, those in flight too. Raises ``NotFound``, ``InvalidRequest`` for a pinned one."""
    bound = None if body.max_version_lag is None else Staleness(body.max_version_lag, body.on_stale)
    async with services.database.write() as transaction:
        return _info(await bound_staleness(transaction, caller, sampler_id, bound))


def _info(sampler: Sampler) -> StalenessInfo:
    bound = staleness_of(sampler)
    return StalenessInfo(
        sampler_id=sampler.id,
        max_version_lag=bound.max_version_lag if bound else None,
        on_stale=bound.on_stale if bound else None,
        publications=sampler.publications,
    )
