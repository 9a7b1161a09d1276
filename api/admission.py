"""Admission of requests: how many of one tenant are in progress at a time, and how many bytes of bodies they bring."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from api.change_pace import ChangePace
from api.fair_threads import FairThreads
from api.loop_time import LoopTime
from api.route_bounds import Holding, bounds_of
from api.tenant_shares import TenantShares
from contracts.errors import PollAgain, TooManyRequests
from contracts.ids import TenantId
from store.fair_places import STRANGERS, ask_for
from store.settings import Settings

PATIENCE_SECONDS = 10.0
"""Longest wait of a request for its turn among its tenant's requests; the SDK waits 60 s for an answer."""
POLL_PATIENCE_SECONDS = 2.0
"""Longest wait of a poll for a place. The SDK polls again without a pause, and gives up its shortest poll after 5 s."""

_RELOADS = 4
"""Reloads of one tenant in progress at a time; further ones wait for their turn for ``PATIENCE_SECONDS``."""
_DOWNLOADS = 16
"""Downloads of one tenant in progress at a time: an archive holds every file of its checkpoint open until it is sent."""
_LEAVE = "weft.leave"


class Admission:
    """Shares of tenants in one API process. Tenants are told to wait; other tenants' requests are not touched."""

    def __init__(self, settings: Settings) -> None:
        self.loop_time = LoopTime()
        self.changes = ChangePace(settings.tenant_changes)
        self.threads = FairThreads(settings.body_threads, self.loop_time)
        self.body_bytes = TenantShares(settings.tenant_body_bytes)
        self.uploads = TenantShares(1)
        """Archives that come in: each tenant's one after the other, so that what is staged stays within its storage."""
        self._usage = TenantShares(1)
        self._downloads = TenantShares(_DOWNLOADS)
        self.reloads = TenantShares(_RELOADS)
        """Reloads in progress, each of which may have every replica of a base model load a version."""
        self.copies = TenantShares(1)
        """Copies of checkpoints: each tenant's one after the other, so that they stay within its storage and leave threads."""
        self._at_once = TenantShares(settings.tenant_requests)
        self._polls = TenantShares(settings.tenant_polls)
        self._streams = TenantShares(settings.tenant_streams)

    async def enter(self, tenant: TenantId, scope: Scope) -> None:
        """Admit a request until its answer is sent. Raises ``TooManyRequests``, or ``PollAgain`` for a poll.

        A request that is answered at once waits for its turn, and a poll waits a little, which keeps its client from asking
        all the time. A stream would wait for too long, so it is refused.
        """
        match bounds_of(scope).holding:
            case Holding.NO:
                shares, patience, what = self._at_once, PATIENCE_SECONDS, "requests in progress"
            case Holding.POLL:
                shares, patience, what = self._polls, POLL_PATIENCE_SECONDS, "held polls"
            case Holding.STREAM:
                shares, patience, what = self._streams, 0.0, "streams and chats in progress"
        try:
            await shares.take(tenant, 1, patience=patience, what=what)
        except TooManyRequests as error:
            if shares is self._polls:
                # SDKs up to 0.18 take 429 as the end of the result.
                raise PollAgain(error.message) from None
            raise
        _give_back_at_end(scope, shares, tenant)

    async def hold_usage(self, tenant: TenantId, scope: Scope) -> None:
        """Hold the tenant's one list of usage events until the request's answer is sent. Raises ``TooManyRequests``."""
        await self._usage.take(tenant, 1, patience=PATIENCE_SECONDS, what="lists of usage events")
        _give_back_at_end(scope, self._usage, tenant)

    async def hold_download(self, tenant: TenantId, scope: Scope) -> None:
        """Hold one of the tenant's few downloads until the request's answer is sent. Raises ``TooManyRequests``."""
        await self._downloads.take(tenant, 1, patience=PATIENCE_SECONDS, what="downloads in progress")
        _give_back_at_end(scope, self._downloads, tenant)


def _give_back_at_end(scope: Scope, shares: TenantShares, tenant: TenantId) -> None:
    leave: list[Callable[[], None]] = scope.setdefault(_LEAVE, [])
    leave.append(lambda: shares.give_back(tenant, 1))


class AdmissionEnd:
    """ASGI middleware that ends what ``Admission.enter`` began, once the answer is sent or the client is gone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a stranger, until its key is known, then give back the request's share."""
        ask_for(STRANGERS)
        leave: list[Callable[[], None]] = []
        scope[_LEAVE] = leave
        try:
            await self._app(scope, receive, send)
        finally:
            for one in leave:
                one()
