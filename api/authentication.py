"""Authentication: the dependency that turns a request's API key into the tenant who sent it."""

from typing import Annotated

from fastapi import Depends, Request

from api.presented_key import presented_key
from api.security_events import note_refused_key
from api.services import Services
from contracts.errors import Unauthenticated
from contracts.ids import TenantId
from store.fair_places import ask_for
from telemetry.context import note_caller


async def get_caller(request: Request, services: Services) -> TenantId:
    """Return the tenant whose key is in ``X-API-Key`` or in ``Authorization: Bearer``.

    The request then counts among the tenant's requests in progress. Raises ``Unauthenticated``, ``TooManyRequests``.
    """
    key = presented_key(request.headers)
    try:
        holder = await services.batched_reads.keys.authenticate(key)
    except Unauthenticated:
        services.admission.loop_time.forget(key)
        note_refused_key(request, key)
        raise
    services.admission.loop_time.know(key, holder.tenant)
    note_caller(holder.tenant, holder.key_id)
    ask_for(holder.tenant)
    await services.admission.enter(holder.tenant, request.scope)
    return holder.tenant


Caller = Annotated[TenantId, Depends(get_caller)]
"""Parameter type of an endpoint that needs a key. Declare it before the body: a body without a valid key stays unread."""
