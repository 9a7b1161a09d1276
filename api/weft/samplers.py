"""Endpoints of a live sampler's staleness: how many versions its samples may fall behind, and whether each cuts them."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.acting import record_act
from api.authentication import GateKeeper, SampleReader
from api.json_body import PathId, json_body
from api.services import Services
from api.wire.request_model import RequestModel
from store.tables import Sampler
from tenants.audit import session_of
from tenants.audit_actions import Action
from tenants.samplers import OnStale, Staleness, SwapPolicy, bound_staleness, get_sampler, staleness_of, swap_policy_of

router = APIRouter(prefix="/samplers", tags=["samplers"])


class StalenessRequest(RequestModel):
    """A new bound: ``max_version_lag`` versions may be published after a sample's first token; null lifts the bound.

    ``on_stale`` says what happens to a sample that falls further behind. ``swap_policy`` says what a publication does to
    samples in flight; null: what the service's setting says.
    """

    max_version_lag: int | None = Field(ge=0, le=2**31 - 1)
    on_stale: OnStale = OnStale.FAIL
    swap_policy: SwapPolicy | None = None


class StalenessInfo(BaseModel):
    """A sampler's bound and swap policy, and the number of versions it has followed so far (``publications``)."""

    sampler_id: str
    max_version_lag: int | None
    on_stale: OnStale | None
    swap_policy: SwapPolicy | None
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
    """Set the staleness bound and the swap policy of a live sampler; they hold for samples in flight, too.

    Raises ``NotFound``; ``InvalidRequest`` for a sampler that is pinned to one version.
    """
    bound = None if body.max_version_lag is None else Staleness(body.max_version_lag, body.on_stale)
    async with services.runtime.database.write() as transaction:
        info = _info(await bound_staleness(transaction, caller.reach, sampler_id, bound, body.swap_policy))
        await record_act(
            transaction,
            services,
            caller,
            Action.SAMPLER_SET,
            sampler_id,
            session_id=session_of(sampler_id),
            after={
                "max_version_lag": info.max_version_lag,
                "on_stale": info.on_stale,
                "swap_policy": info.swap_policy,
            },
        )
    return info


def _info(sampler: Sampler) -> StalenessInfo:
    bound = staleness_of(sampler)
    return StalenessInfo(
        sampler_id=sampler.id,
        max_version_lag=bound.max_version_lag if bound else None,
        on_stale=bound.on_stale if bound else None,
        swap_policy=swap_policy_of(sampler),
        publications=sampler.publications,
    )
