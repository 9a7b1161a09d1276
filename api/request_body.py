"""The body of a request: read within the route's bounds and the tenant's share of memory, once the caller is known."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import ParamSpec, TypeVar

from fastapi import Request

from api.route_bounds import SMALL_BODY, bounds_of
from api.services import ApiServices
from api.wire.body import expanded, read_body
from contracts.ids import TenantId

OFF_LOOP_BYTES = 8 * 1024
"""Largest body that is parsed on the event loop; for less, a thread would cost more than the work."""

P = ParamSpec("P")
T = TypeVar("T")


@asynccontextmanager
async def request_body(
    request: Request, services: ApiServices, caller: TenantId, *, limit: int | None = None
) -> AsyncIterator[bytes]:
    """Read the body, and hold its size of the tenant's share until the context ends.

    ``limit`` in bytes; by default the route's. A tenant with much under way waits here, with its body unread. Raises
    ``PayloadTooLarge``, ``InvalidRequest``, ``BodyTooSlow``.
    """
    settings = services.runtime.settings
    limit = min(bounds_of(request.scope).body_bytes if limit is None else limit, settings.max_body_bytes)
    size = _announced(request, limit)
    shares = services.admission.body_bytes
    async with AsyncExitStack() as held:
        # A small body never waits behind its tenant's large ones: it may be a heartbeat.
        if size > SMALL_BODY:
            await held.enter_async_context(shares.held(caller, size, patience=None, what="bytes of bodies"))
        raw = await read_body(request, limit, idle_seconds=settings.body_timeout.total_seconds())
        if raw.encoding == "zstd":
            # A few bytes may expand to the whole limit, so this never runs on the event loop.
            yield await services.admission.threads.run(caller, expanded, raw, limit)
        else:
            yield expanded(raw, limit)


async def off_loop(
    services: ApiServices, caller: TenantId, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return ``function``'s result; it runs on a thread if ``size``, the bytes it works on, is more than a few KiB."""
    if size <= OFF_LOOP_BYTES:
        return function(*args, **kwargs)
    return await services.admission.threads.run(caller, function, *args, **kwargs)


def _announced(request: Request, limit: int) -> int:
    """Return the bytes that the body may take: as announced, or else the limit."""
    length = request.headers.get("content-length", "")
    is_plain = request.headers.get("content-encoding", "identity").strip().lower() == "identity"
    return min(int(length), limit) if is_plain and length.isascii() and length.isdigit() and len(length) < 20 else limit
