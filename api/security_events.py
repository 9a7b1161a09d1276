"""Security events of requests: refused keys, ids that are not the caller's, revoked keys and downloads."""

import re

from fastapi import Request

from api.services import ApiServices
from telemetry.context import current_work
from telemetry.security import SecurityEvent, SecurityRecord, note

_OWN_KEY = re.compile(r"tml-[0-9a-f]{12}(?=-)")
"""Public first part of a key. A text of another form may be a secret of another service."""
_MOST_CHARACTERS = 200


def source_of(request: Request) -> str | None:
    """Return the address that the request came from, as far as proxies are trusted to say it."""
    return None if request.client is None else request.client.host


def note_refused_key(request: Request, presented: str | None) -> None:
    """Note a request without a live key."""
    key = _OWN_KEY.match(presented or "")
    _sampled(request, SecurityEvent.KEY_REFUSED, actor=None if key is None else key[0])


def note_not_found(request: Request, *, is_foreign: bool) -> None:
    """Note a request for something that is not its sender's. ``is_foreign``: it is known to be another tenant's."""
    _sampled(request, SecurityEvent.FOREIGN_ID if is_foreign else SecurityEvent.NOT_FOUND, actor=None)


def note_access(request: Request, event: SecurityEvent, resource: str, *, actor: str | None = None) -> None:
    """Note something that was done with ``resource``, by the current tenant if there is one."""
    source, tenant = source_of(request), current_work().tenant
    note(SecurityRecord(event=event, outcome="done", actor=actor, tenant=tenant, source=source, resource=resource))


def _sampled(request: Request, event: SecurityEvent, *, actor: str | None) -> None:
    services: ApiServices = request.app.state.services
    record = SecurityRecord(
        event=event,
        outcome="refused",
        actor=actor,
        tenant=current_work().tenant,
        source=source_of(request),
        detail=f"{request.method} {_path(request)[:_MOST_CHARACTERS]}",
    )
    services.runtime.telemetry.refusals.note(record)


def _path(request: Request) -> str:
    """Return the route's template where it has a secret in its path, else the path."""
    template: str = getattr(request.scope.get("route"), "path", "")
    return template if "{secret}" in template else request.url.path
