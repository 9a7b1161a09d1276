"""Access tokens: an API key of another tenant that a request shows for one of that tenant's checkpoints.

The token is checked as any key is and stored nowhere. What it gives access to is read under that key's own rights.
"""

from dataclasses import dataclass, field

from fastapi import Request

from api.security_events import note_refused_key, source_of
from api.services import ApiServices
from contracts.errors import Forbidden, NotFound, Unauthenticated
from contracts.paths import Segment, parse_path
from store.tables import Checkpoint, Run
from tenants.rights import Principal
from tenants.sharing import find_granted, find_readable


@dataclass(frozen=True, slots=True)
class Accessible:
    """A checkpoint that may be read, its run, and the principal of the access token's key, None without a token."""

    checkpoint: Checkpoint
    run: Run
    holder: Principal | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Checkpoint that a request names, and the token that it shows for it, None without one."""

    request: Request
    path: str
    token: str | None = field(default=None, repr=False)


async def granted(services: ApiServices, access: Access, *, segment: Segment | None = None) -> Accessible | None:
    """Return the checkpoint that the token gives access to, None without a token.

    Raises ``Forbidden``, in one form for every reason why the token gives none, and ``InvalidRequest`` for a path that is none.
    """
    if access.token is None:
        return None
    path = parse_path(access.path, segment=segment)
    try:
        holder = await services.batched_reads.keys.authenticate(access.token, source_of(access.request))
        async with services.runtime.database.read() as session:
            return Accessible(*await find_granted(session, holder, path, services.runtime.clock), holder)
    except Unauthenticated as refusal:
        note_refused_key(access.request, access.token)
        raise _refusal() from refusal
    except (Forbidden, NotFound) as refusal:
        raise _refusal() from refusal


async def readable(
    services: ApiServices, caller: Principal, access: Access, *, segment: Segment | None = None
) -> Accessible:
    """Return the checkpoint that the token gives access to, or without one the caller's or a published one.

    Raises ``NotFound``, and as ``granted``.
    """
    found = await granted(services, access, segment=segment)
    if found is not None:
        return found
    path = parse_path(access.path, segment=segment)
    async with services.runtime.database.read() as session:
        return Accessible(*await find_readable(session, caller.reach, path, services.runtime.clock))


def _refusal() -> Forbidden:
    return Forbidden(
        "weights_access_token gives no access to this checkpoint; send a live key of its tenant with checkpoints.download"
    )
