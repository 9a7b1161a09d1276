"""A few threads for work that would hold up the event loop: parsing, tokenizing, encoding.

Each tenant has at most half of them, and one thread at least, so that one tenant's heavy bodies leave room for others. Such
work shares the interpreter and the cores with the event loop, so its processor time counts to the tenant's part of the loop's.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import thread_time
from typing import ParamSpec, TypeVar

from api.loop_time import LoopTime
from api.tenant_shares import TenantShares
from contracts.ids import TenantId

P = ParamSpec("P")
T = TypeVar("T")


class FairThreads:
    """Runs functions on ``threads`` threads, in turn between tenants."""

    def __init__(self, threads: int, loop_time: LoopTime) -> None:
        """``loop_time`` tells when a tenant that has used more than its part may use a thread again."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="bodies")
        self._shares = TenantShares(max(1, threads // 2))
        self._loop_time = loop_time

    async def run(self, tenant: TenantId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``function``'s result, computed on a thread. Raises what it raises.

        The tenant keeps its thread until the function has ended, also when the caller does not wait for it any more.
        """

        async def compute() -> T:
            async with self._shares.held(tenant, patience=None, what="work on bodies"):
                with self._loop_time.used_by(tenant) as sender:
                    await self._loop_time.turn(sender, 0.0, has_begun=True)
                    loop, used = asyncio.get_running_loop(), 0.0

                    def timed() -> T:
                        nonlocal used
                        began = thread_time()
                        try:
                            return function(*args, **kwargs)
                        finally:
                            used = thread_time() - began

                    try:
                        return await loop.run_in_executor(self._executor, timed)
                    finally:
                        self._loop_time.charge(sender, used)

        return await asyncio.shield(asyncio.ensure_future(compute()))
