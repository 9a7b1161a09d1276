"""Shares of something scarce: how much one tenant may have in use at a time, so that the others find room."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from contracts.errors import TooManyRequests
from contracts.ids import TenantId


@dataclass(slots=True)
class _Share:
    """Amount that one tenant has in use, and its requests that wait for more, first come first."""

    used: int = 0
    waiting: "OrderedDict[asyncio.Future[None], int]" = field(default_factory=OrderedDict)


class TenantShares:
    """Amounts in use, at most ``each`` a tenant. Tenants without any take no memory. Used from one event loop."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._shares: dict[TenantId, _Share] = {}

    def used(self, tenant: TenantId) -> int:
        """Return the amount that the tenant has in use."""
        share = self._shares.get(tenant)
        return 0 if share is None else share.used

    async def take(self, tenant: TenantId, amount: int, *, patience: float | None, what: str) -> None:
        """Take ``amount`` for the tenant; ``give_back`` returns it. More than ``each`` counts as ``each``.

        Waits up to ``patience`` seconds, None for as long as it takes. Raises ``TooManyRequests``, which names ``what``.
        """
        amount = min(amount, self._each)
        share = self._shares.setdefault(tenant, _Share())
        if not share.waiting and share.used + amount <= self._each:
            share.used += amount
            return
        if patience == 0:
            raise TooManyRequests(f"{what}: {self._each} at a time; send it again once others have ended")
        turn = asyncio.get_running_loop().create_future()
        share.waiting[turn] = amount
        try:
            async with asyncio.timeout(patience):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.give_back(tenant, amount)
            elif share.waiting.pop(turn, None) is not None:
                self._go_on(tenant, share)
            if isinstance(error, TimeoutError):
                raise TooManyRequests(f"{what}: {self._each} at a time; send it again once others have ended") from None
            raise

    def give_back(self, tenant: TenantId, amount: int) -> None:
        """Return an amount that was taken, and let the tenant's next in turn go on."""
        share = self._shares[tenant]
        share.used -= min(amount, self._each)
        self._go_on(tenant, share)

    def _go_on(self, tenant: TenantId, share: _Share) -> None:
        while share.waiting:
            turn, amount = next(iter(share.waiting.items()))
            if share.used + amount > self._each:
                break
            del share.waiting[turn]
            if not turn.done():
                share.used += amount
                turn.set_result(None)
        if not share.used and not share.waiting:
            del self._shares[tenant]

    @asynccontextmanager
    async def held(
        self, tenant: TenantId, amount: int = 1, *, patience: float | None, what: str
    ) -> AsyncIterator[None]:
        """Hold ``amount`` for the length of the context. Raises as ``take``."""
        await self.take(tenant, amount, patience=patience, what=what)
        try:
            yield
        finally:
            self.give_back(tenant, amount)
