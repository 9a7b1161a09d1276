"""A few threads for work that would hold up the event loop: parsing, tokenizing, encoding.

Each tenant has at most half of them, and one thread at least, so that one tenant's heavy bodies leave room for others.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from api.tenant_shares import TenantShares
from contracts.ids import TenantId

P = ParamSpec("P")
T = TypeVar("T")


class FairThreads:
    """Runs functions on ``threads`` threads, in turn between tenants."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="bodies")
        self._shares = TenantShares(max(1, threads // 2))

    async def run(self, tenant: TenantId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``function``'s result, computed on a thread. Raises what it raises.

        The tenant keeps its thread until the function has ended, also when the caller does not wait for it any more.
        """

        async def compute() -> T:
            async with self._shares.held(tenant, patience=None, what="work on bodies"):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

        return await asyncio.shield(asyncio.ensure_future(compute()))
