"""Creations that wait: the base model has as many open runs as it may, or the run's tenant or project has."""

from collections.abc import Sequence

from contracts.ids import RunId, TenantId
from ledger.runtime import Runtime
from tenants.audit import session_of
from tenants.limit_use import RUN_USE
from tenants.limits import Limits
from tenants.project_limits import uses_of_sessions
from tenants.runs import open_runs

MOST_ASKED = 256
"""Most runs of one tenant that one look decides on; the next look takes the others."""


class CreationLimits:
    """Tells which creations wait. One is tried again after an unload, and with each sweep of the worker."""

    def __init__(self, runtime: Runtime, base_model: str) -> None:
        self._database = runtime.database
        self._base_model = base_model
        self._most = runtime.settings.max_adapters
        self._defaults = Limits.of(runtime.settings)
        self._is_full = False
        self._full_tenants: set[TenantId] = set()
        self._held_runs: set[RunId] = set()
        """Runs whose projects are full: other projects of their tenants go on."""
        self._admitted: dict[TenantId, set[RunId]] = {}
        """Runs that had room at the last look, by tenant, until one of its runs is opened."""

    def holds_back(self, tenant: TenantId, run: RunId) -> bool:
        """Return whether the creation of the tenant's ``run`` is known to wait."""
        return self._is_full or tenant in self._full_tenants or run in self._held_runs

    def admits(self, tenant: TenantId, run: RunId) -> bool:
        """Return whether the run had room when it was asked for, so that memory may be made for it."""
        return run in self._admitted.get(tenant, ())

    def look_again(self) -> None:
        """Have every creation that waits tried again."""
        self._is_full = False
        self._full_tenants.clear()
        self._held_runs.clear()
        self._admitted.clear()

    async def ask(self, tenant: TenantId, runs: Sequence[RunId]) -> None:
        """Find out which of the tenant's waiting ``runs`` may be opened now: the others wait, with all of a full project's."""
        async with self._database.read() as session:
            if self._most is not None:
                self._is_full = await open_runs(session, self._base_model) >= self._most
            use = await RUN_USE.of(session, tenant, self._defaults)
            projects = await uses_of_sessions(session, {session_of(run) for run in runs}, ["open_runs"])
        if not use.may_open_run:
            self._full_tenants.add(tenant)
        full = {session for session, project in projects.items() if not project.has_room("open_runs")}
        self._held_runs.update(run for run in runs if session_of(run) in full)
        admitted = self._admitted.setdefault(tenant, set())
        admitted.update(run for run in runs if not self.holds_back(tenant, run))

    async def has_room(self, tenant: TenantId, run: RunId) -> bool:
        """Return whether ``run``, which was admitted, still may be opened. The tenant's others are asked for anew."""
        await self.ask(tenant, [run])
        del self._admitted[tenant]
        return not self.holds_back(tenant, run)

    def hold_back(self, run: RunId) -> None:
        """Have the run's creation wait."""
        self._held_runs.add(run)
