"""Watch of the web sessions behind streams: one look a second for all of a process.

A look costs one statement for up to 128 sessions, and another for up to 128 runs that sessions of keys for some projects look
at: a run's session may move to another project. It holds no connection while it waits, and counts as no use of a session.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field

from fastapi import Request

from api.dashboard.cookies import session_cookie
from api.security_events import source_of
from contracts.errors import Forbidden, Suspended, Unauthenticated
from store.batcher import Batcher
from store.database import Database
from store.repeat import repeat
from tenants.rights import Principal
from tenants.runs import RunPlace, run_places
from tenants.web_sessions import WebSessionReader

LOOK_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class _Watched:
    """The session of one stream: the secret in its cookie, and where the request came from; the run that it tells of, if any."""

    token: str | None
    address: str | None
    run: str | None
    bell: asyncio.Event | None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        """Set ``ended``, and ring."""
        self.ended.set()
        if self.bell is not None:
            self.bell.set()


class SessionWatch:
    """Looks whether the sessions of a process's streams are still let in. It runs while there are streams."""

    def __init__(self, sessions: WebSessionReader, database: Database) -> None:
        self._sessions = sessions
        self._database = database
        self._places: Batcher[str, RunPlace | None] = Batcher(self._read)
        self._watched: set[_Watched] = set()
        self._unwatched = asyncio.Event()
        self._looks: set[asyncio.Task[None]] = set()

    @contextmanager
    def watch(
        self, request: Request, bell: asyncio.Event | None = None, run: str | None = None
    ) -> Iterator[asyncio.Event]:
        """Yield an event that is set soon after a new request of the same session from there, for ``run``, would be refused.

        ``bell`` is set as well.
        """
        one = _Watched(session_cookie(request), source_of(request), run, bell)
        if not self._watched:
            self._begin()
        self._watched.add(one)
        try:
            yield one.ended
        finally:
            self._watched.discard(one)
            if not self._watched:
                self._unwatched.set()

    def _begin(self) -> None:
        self._unwatched = asyncio.Event()
        looking = repeat(
            self._look, seconds=LOOK_SECONDS, stopping=self._unwatched, failed="sessions of streams are not looked at"
        )
        # An empty context: the log lines of a look belong to no single request.
        task = asyncio.create_task(looking, name="session watch", context=Context())
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    async def _look(self) -> None:
        """End what is watched of the sessions that are refused. An ``Unavailable`` database refuses none, and is raised."""
        of_sessions: defaultdict[tuple[str | None, str | None], list[_Watched]] = defaultdict(list)
        for one in self._watched:
            of_sessions[one.token, one.address].append(one)
        looks = (self._check(*session, watched) for session, watched in of_sessions.items())
        for failure in await asyncio.gather(*looks, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _check(self, token: str | None, address: str | None, watched: list[_Watched]) -> None:
        try:
            principal = await self._sessions.principal(token, address)
            principal.check_address()
            principal.check_not_blocked()
            lost = await self._lost(principal, {one.run for one in watched if one.run is not None})
        except (Unauthenticated, Forbidden, Suspended):
            for one in watched:
                one.end()
            return
        for one in watched:
            if one.run in lost:
                one.end()

    async def _lost(self, principal: Principal, runs: set[str]) -> set[str]:
        """Return the runs that the key reaches no more. A key for all projects found them as its tenant's, and they stay."""
        if principal.rights.projects is None:
            return set()
        places = zip(runs, await asyncio.gather(*map(self._places.ask, runs)), strict=True)
        return {run for run, place in places if place is None or not place.is_reached_by(principal.reach)}

    async def _read(self, runs: Sequence[str]) -> list[RunPlace | None]:
        async with self._database.read() as session:
            found = await run_places(session, set(runs))
        return [found.get(run) for run in runs]
