"""Authentication: dependencies that turn a request's API key into the principal that it acts as, and check its scopes.

Every endpoint declares what it needs by the type of its parameter ``caller``. Declare it before the body: a body without a
valid key, or of a key without the scope, stays unread.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import Depends, Request

from api.presented_key import presented_key
from api.request_rates import count_request
from api.security_events import note_refused_key, source_of
from api.services import ApiServices, Services
from api.suspended_requests import check_standing, check_standing_again
from api.wire.late_body import check_after_body
from api.wire.sdk_version import pauses_unpaid
from contracts.errors import Unauthenticated
from store.fair_places import ask_for
from telemetry.context import note_caller
from tenants.rights import Principal, Scope


async def get_caller(request: Request, services: Services) -> Principal:
    """Return the principal whose key is in ``X-API-Key`` or in ``Authorization: Bearer``.

    The request then counts among the tenant's requests in progress. Raises ``Unauthenticated``, ``Forbidden`` for an address
    that the key may not be used from, ``Suspended`` as ``check_standing``, ``OverRate`` beyond a rate of requests,
    ``TooManyRequests``.
    """
    principal = await _authenticated(request, services)
    note_caller(principal.tenant, principal.key_id)
    # For the handlers of errors, which tell who was refused.
    request.state.principal = principal
    principal.check_address()
    check_standing(request, principal)
    check_after_body(request, partial(_check_again, services, principal))
    await count_request(request, services, principal)
    ask_for(principal.tenant)
    await services.admission.enter(principal.tenant, request.scope)
    return principal if pauses_unpaid(request) else replace(principal, pauses_unpaid=False)


async def _authenticated(request: Request, services: ApiServices) -> Principal:
    key = presented_key(request.headers)
    try:
        principal = await services.batched_reads.keys.authenticate(key, source_of(request))
    except Unauthenticated:
        services.admission.loop_time.forget(key)
        note_refused_key(request, key)
        raise
    services.admission.loop_time.know(key, principal.tenant)
    return principal


async def _check_again(services: ApiServices, before: Principal, request: Request) -> None:
    """Raise what refuses a caller whose key or tenant has ended or been suspended while its body came."""
    check_standing_again(request, before, await _authenticated(request, services))


Caller = Annotated[Principal, Depends(get_caller)]
"""Parameter type of a dependency of an endpoint that has declared its scopes itself."""


class Require:
    """Dependency of an endpoint that needs one of some scopes; with none named, any live key is enough."""

    def __init__(self, *any_of: Scope) -> None:
        self.any_of = any_of

    async def __call__(self, principal: Caller) -> Principal:
        """Return the principal. Raises ``Forbidden`` without any of the scopes."""
        principal.check(*self.any_of)
        return principal


AnyKey = Annotated[Principal, Depends(Require())]
"""Caller with any live key: session set-up, and polling of results."""
Reader = Annotated[Principal, Depends(Require(Scope.READ))]
TrainReader = Annotated[Principal, Depends(Require(Scope.READ, Scope.TRAIN))]
"""Caller who reads what the SDK reads when it trains."""
SampleReader = Annotated[Principal, Depends(Require(Scope.READ, Scope.SAMPLE))]
"""Caller who reads what the SDK reads when it samples."""
TrainCaller = Annotated[Principal, Depends(Require(Scope.TRAIN))]
"""Caller who trains. What else stands against an operation of a run makes it fail, so that its number is used up."""
SampleCaller = Annotated[Principal, Depends(Require(Scope.SAMPLE))]
CheckpointWriter = Annotated[Principal, Depends(Require(Scope.CHECKPOINTS_WRITE))]
Downloader = Annotated[Principal, Depends(Require(Scope.CHECKPOINTS_DOWNLOAD))]
JobReader = Annotated[Principal, Depends(Require(Scope.READ, Scope.CHECKPOINTS_WRITE))]
GateReader = Annotated[Principal, Depends(Require(Scope.READ, Scope.GATES))]
GateKeeper = Annotated[Principal, Depends(Require(Scope.GATES))]
UsageReader = Annotated[Principal, Depends(Require(Scope.READ, Scope.USAGE))]
BillingReader = Annotated[Principal, Depends(Require(Scope.USAGE))]
ProjectReader = Annotated[Principal, Depends(Require(Scope.READ, Scope.PROJECTS))]
ProjectMover = Annotated[Principal, Depends(Require(Scope.TRAIN, Scope.PROJECTS))]
KeyAdmin = Annotated[Principal, Depends(Require(Scope.KEYS))]
AuditReader = Annotated[Principal, Depends(Require(Scope.AUDIT))]
ProjectAdmin = Annotated[Principal, Depends(Require(Scope.PROJECTS))]
WebhookAdmin = Annotated[Principal, Depends(Require(Scope.WEBHOOKS))]
