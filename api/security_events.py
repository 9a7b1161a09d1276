"""Security events of requests: refused keys, ids that are not the caller's, revoked keys and downloads.

Events go to the security log, one by one. Refusals, and reads of what is sensitive, are also counted for the audit log, which
tells each tenant of its own (``tenants.audit_tally``).
"""

import re

from fastapi import Request

from api.acting import acting
from api.services import ApiServices
from contracts.errors import Forbidden, NotFound, Unauthenticated, WeftError
from contracts.ids import TenantId
from telemetry.context import current_work
from telemetry.security import SecurityEvent, SecurityRecord, note
from tenants.audit import Actor, Door, session_of
from tenants.audit_actions import Action
from tenants.audit_tally import UNKNOWN_KEY, Repeated
from tenants.downloads import FollowedLink
from tenants.rights import Principal

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
    name = UNKNOWN_KEY if key is None else key[0]
    actor = Actor(Door.KEY, name, address=source_of(request), trace_id=current_work().trace_id)
    _count_refusal(request, actor, None, Unauthenticated.code)


def note_refusal(request: Request, error: WeftError, caller: Principal | None = None) -> None:
    """Note a request that is refused for its key's rights, or for something that is not its sender's.

    ``caller``: by default the request's.
    """
    if isinstance(error, NotFound):
        _sampled(request, SecurityEvent.FOREIGN_ID if error.is_foreign else SecurityEvent.NOT_FOUND, actor=None)
    caller = caller or getattr(request.state, "principal", None)
    if isinstance(error, Forbidden) and caller is not None:
        _sampled(request, SecurityEvent.FORBIDDEN, actor=caller.prefix)
        _count_refusal(request, acting(caller), caller.tenant, error.code)


def note_blocked(request: Request, told: str) -> None:
    """Note a browser's report that the pages' content policy has kept something from it."""
    _sampled(request, SecurityEvent.POLICY_VIOLATED, actor=None, detail=told)


def note_access(request: Request, event: SecurityEvent, resource: str, *, actor: str | None = None) -> None:
    """Note something that was done with ``resource``, by the current tenant if there is one."""
    source, tenant = source_of(request), current_work().tenant
    note(SecurityRecord(event=event, outcome="done", actor=actor, tenant=tenant, source=source, resource=resource))


def note_download(request: Request, link: FollowedLink, file: str) -> None:
    """Note that somebody fetches a file by a link."""
    note_access(request, SecurityEvent.DOWNLOADED, f"{link.directory.rpartition('/')[2]}/{file}")
    source, trace = source_of(request), current_work().trace_id
    _services(request).audit_tally.note(
        Repeated(
            action=Action.CHECKPOINT_READ,
            actor=Actor(Door.LINK, link.prefix or "a link", link.key_id, link.role, source, trace),
            tenant=link.tenant,
            resource_id=str(link.path),
            cause="download",
            session_id=session_of(link.path.run_id),
        )
    )


def note_read(request: Request, caller: Principal, action: Action) -> None:
    """Note that the caller reads what is sensitive, and changes nothing."""
    _services(request).audit_tally.note(
        Repeated(
            action=action,
            actor=acting(caller),
            tenant=caller.tenant,
            resource_id=request.url.path,
            cause="read",
        )
    )


def _count_refusal(request: Request, actor: Actor, tenant: TenantId | None, cause: str) -> None:
    asked = f"{request.method} {_path(request)[:_MOST_CHARACTERS]}"
    _services(request).audit_tally.note(
        Repeated(action=Action.REQUEST_REFUSE, actor=actor, tenant=tenant, resource_id=asked, cause=cause)
    )


def _sampled(request: Request, event: SecurityEvent, *, actor: str | None, detail: str | None = None) -> None:
    record = SecurityRecord(
        event=event,
        outcome="refused",
        actor=actor,
        tenant=current_work().tenant,
        source=source_of(request),
        detail=detail or f"{request.method} {_path(request)[:_MOST_CHARACTERS]}",
    )
    _services(request).runtime.telemetry.refusals.note(record)


def _services(request: Request) -> ApiServices:
    services: ApiServices = request.app.state.services
    return services


def _path(request: Request) -> str:
    """Return the route's template where it has a secret in its path, else the path."""
    template: str = getattr(request.scope.get("route"), "path", "")
    return template if "{secret}" in template else request.url.path
