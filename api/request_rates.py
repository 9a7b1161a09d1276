"""Counts of requests against the rates of their tenant, project and key. Requests that a client counts on are not counted."""

from collections.abc import Mapping

from fastapi import Request

from api.rate_headers import note_requests
from api.route_bounds import bounds_of
from api.services import ApiServices
from contracts.errors import OverRate
from tenants.project_limits import named_limits
from tenants.reach import default_project
from tenants.request_rates import RequestCount, RequestRate, RequestScope, request_rate
from tenants.rights import Principal

_OWNERS = {RequestScope.KEY: "this API key", RequestScope.PROJECT: "project {id}", RequestScope.TENANT: "your tenant"}


async def count_request(request: Request, services: ApiServices, caller: Principal) -> None:
    """Count the request, if its route is one that counts. Raises ``OverRate`` for one more than a rate lets in."""
    if not bounds_of(request.scope).is_counted:
        return
    rates = await _rates(request, services, caller)
    if not rates:
        return
    count, is_let_in = await services.runtime.request_rates.count(rates)
    note_requests(count)
    if not is_let_in:
        raise _refusal(count)


async def _rates(request: Request, services: ApiServices, caller: Principal) -> list[RequestRate]:
    """Return the request's rates, the narrowest first."""
    tenant, rates = caller.tenant, request_rate(caller.tenant, RequestScope.KEY, caller.payer, caller.rights.limits)
    if (project := await _project(request, services, caller)) is not None:
        rates += request_rate(tenant, RequestScope.PROJECT, *project)
    return rates + request_rate(tenant, RequestScope.TENANT, tenant, services.limits_of(caller).by_name())


async def _project(
    request: Request, services: ApiServices, caller: Principal
) -> tuple[str, Mapping[str, int] | None] | None:
    """Return the id and limits of the project that the request is known to be for: that it names, or the only one of its key."""
    reached = caller.projects
    named = request.query_params.get("project_id") or (
        min(reached) if reached is not None and len(reached) == 1 else None
    )
    # PostgreSQL takes no NUL in a text; no project's name has one.
    if named is None or "\0" in named or named == default_project(caller.tenant):
        return None
    async with services.runtime.database.read() as session:
        found = await named_limits(session, caller.tenant, named)
    return found if found is not None and (reached is None or found[0] in reached) else None


def _refusal(count: RequestCount) -> OverRate:
    rate, seconds = count.rate, max(1, count.seconds)
    owner = _OWNERS[rate.scope].format(id=rate.id)
    return OverRate(
        f"the rate of {owner} of {rate.per_minute} requests a minute is used up; send this request again in {seconds} s",
        seconds=seconds,
    )
