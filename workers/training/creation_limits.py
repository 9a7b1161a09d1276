"""Creations that wait: the base model has as many open runs as it may, or the run's tenant has."""

from contracts.ids import TenantId
from ledger.runtime import Runtime
from tenants.limit_use import RUN_USE
from tenants.limits import Limits
from tenants.runs import open_runs


class CreationLimits:
    """Tells which creations wait. One is tried again after an unload, and with each sweep of the worker."""

    def __init__(self, runtime: Runtime, base_model: str) -> None:
        self._database = runtime.database
        self._base_model = base_model
        self._most = runtime.settings.max_adapters
        self._defaults = Limits.of(runtime.settings)
        self._is_full = False
        self._full_tenants: set[TenantId] = set()

    def holds_back(self, tenant: TenantId) -> bool:
        """Return whether creations of ``tenant`` are known to wait."""
        return self._is_full or tenant in self._full_tenants

    def look_again(self) -> None:
        """Have every creation that waits tried again."""
        self._is_full = False
        self._full_tenants.clear()

    async def has_room(self, tenant: TenantId) -> bool:
        """Return whether ``tenant`` may open one more run now. If not, its creations wait."""
        if self.holds_back(tenant):
            return False
        async with self._database.read() as session:
            if self._most is not None:
                self._is_full = await open_runs(session, self._base_model) >= self._most
            use = await RUN_USE.of(session, tenant, self._defaults)
        if not use.may_open_run:
            self._full_tenants.add(tenant)
        return not self.holds_back(tenant)

    def hold_back(self, tenant: TenantId) -> None:
        """Have the tenant's creations wait."""
        self._full_tenants.add(tenant)
