"""Creations that wait: the base model has as many open runs as it may, or the run's tenant or project has."""

from collections.abc import Sequence
from math import inf

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RunId, TenantId
from ledger.runtime import Runtime
from tenants.audit import session_of
from tenants.limit_use import LIMITED_PROJECTS, RUN_USE
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
        """Runs for which there was room together at the last look, by tenant."""

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
        """Find out which of the tenant's waiting ``runs`` may be opened now, the first ones first.

        The others wait if there is room for none of them, with all of a full project's; else they are asked for later.
        """
        async with self._database.read() as session:
            room = await self._room_in_base(session)
            use = await RUN_USE.of(session, tenant, self._defaults)
            sessions = {session_of(run) for run in runs} if use.used[LIMITED_PROJECTS] else ()
            projects = await uses_of_sessions(session, sessions, ["open_runs"]) if sessions else {}
        if not use.may_open_run:
            self._full_tenants.add(tenant)
        room = min(room, use.room("open_runs"))
        rooms = {project.id: project.room("open_runs") for project in projects.values()}
        admitted: set[RunId] = set()
        for run in runs:
            project = projects.get(session_of(run))
            if project is not None and rooms[project.id] < 1:
                if project.room("open_runs") < 1:
                    self._held_runs.add(run)
                continue
            if len(admitted) < room and not self.holds_back(tenant, run):
                admitted.add(run)
                if project is not None:
                    rooms[project.id] -= 1
        self._admitted[tenant] = admitted

    async def has_room(self, tenant: TenantId, run: RunId) -> bool:
        """Return whether ``run``, which was admitted, still may be opened, as far as one look can tell.

        The room of its tenant and its project was set aside for it. ``open_run_within_limit`` then counts both under their lock.
        """
        self._admitted.get(tenant, set()).discard(run)
        if self._most is not None:
            async with self._database.read() as session:
                await self._room_in_base(session)
        return not self.holds_back(tenant, run)

    def hold_back(self, tenant: TenantId, run: RunId) -> None:
        """Have the run's creation wait, and ask for the tenant's others anew: other trainers have opened some."""
        self._held_runs.add(run)
        self._admitted.pop(tenant, None)

    async def _room_in_base(self, session: AsyncSession) -> float:
        """Return how many more runs the base model may have open, and note whether it is full."""
        if self._most is None:
            return inf
        room = self._most - await open_runs(session, self._base_model)
        self._is_full = room < 1
        return room
