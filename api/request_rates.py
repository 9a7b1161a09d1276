"""Counts of requests against the rates of their tenant, project and key. Requests that a client counts on are not counted."""

from collections.abc import Collection, Mapping, Sequence

from fastapi import Request

from api.rate_headers import note_requests
from api.route_bounds import bounds_of
from api.services import ApiServices
from contracts.errors import OverRate
from tenants.project_limits import ProjectUse, named_limits, uses_of_projects
from tenants.reach import default_project
from tenants.request_rates import REQUEST_RATE, RequestCount, RequestRate, RequestScope, request_rate
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
    """Return the id and limits of the project to whose rate the request counts.

    A name says which, if the key reaches that project; most routes do not read one, so another name frees from nothing.
    """
    named, reached = request.query_params.get("project_id"), caller.projects
    if reached is not None:
        async with services.runtime.database.read() as session:
            return _of_key(await uses_of_projects(session, caller.tenant, reached), named, reached)
    # PostgreSQL takes no NUL in a text; no project's name has one.
    if not named or "\0" in named or named == default_project(caller.tenant):
        return None
    async with services.runtime.database.read() as session:
        return await named_limits(session, caller.tenant, named)


def _of_key(
    own: Sequence[ProjectUse], named: str | None, reached: Collection[str]
) -> tuple[str, Mapping[str, int] | None] | None:
    """Return the project among a key's ``own`` that is named, else the one of the highest rate: the request may be for that.

    None where the key reaches a project without a rate, the default one for example.
    """
    found = next((one for one in own if named in (one.id, one.name)), None)
    if found is None and len(own) == len(reached) and all(one.limits.get(REQUEST_RATE) for one in own):
        found = max(own, key=lambda one: one.limits[REQUEST_RATE], default=None)
    return None if found is None else (found.id, found.limits)


def _refusal(count: RequestCount) -> OverRate:
    rate, seconds = count.rate, max(1, count.seconds)
    owner = _OWNERS[rate.scope].format(id=rate.id)
    return OverRate(
        f"the rate of {owner} of {rate.per_minute} requests a minute is used up; send this request again in {seconds} s",
        seconds=seconds,
    )
