"""Surveys: reads that may go through many rows, as lists, searches and sums do. Few run at a time, and one of each tenant.

On SQLite each runs in a thread, and the event loop goes on meanwhile. A short statement costs less where it is called than its
way to a thread and back (decision 88), so all others run on the event loop. On PostgreSQL a survey is a read like others.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from sqlalchemy import Executable, NullPool, event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from contracts.errors import Unavailable
from store.fair_places import FairPlaces, Owner, asking
from store.letters import know_every_letter
from store.statement_limit import statement_limit, too_slow
from store.statement_parameters import clean_parameters
from store.transaction import SQLITE_BUSY_SECONDS, Transaction

SURVEY_SECONDS = 30.0
"""Longest time of one statement, unless its caller has a shorter limit."""
Charge = Callable[[str, float], None]
LOOKS_EVERY_SECONDS = 0.05
"""Time between two looks at a statement that runs."""
PAGES_WAIT_SECONDS = 10.0
"""Longest wait of a page for its tenant's turn."""
T = TypeVar("T")
_PLACES = 2
"""Surveys of SQLite of one process at a time. The others wait in their tenants' turns."""


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns. A cancellation meanwhile, however often it comes, is raised once the work has ended."""
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()
        raise cancelled
    return task.result()


@asynccontextmanager
async def survey_place(places: FairPlaces) -> AsyncIterator[None]:
    """Hold a place for a survey of the running task's owner. Raises ``Unavailable`` where no turn comes in time."""
    async with AsyncExitStack() as stack:
        try:
            patience = SURVEY_SECONDS if statement_limit() is None else PAGES_WAIT_SECONDS
            await stack.enter_async_context(places.place(patience=patience))
        except TimeoutError as error:
            raise Unavailable("other lists of yours are being read; try again in a moment") from error
        yield


class ThreadTransaction(Transaction):
    """A session for reading, whose statements run in the connection's own thread."""

    def __init__(self, connection: AsyncConnection, *, seconds: float | None, charge: Callable[[float], None]) -> None:
        """``charge`` is told, while a statement runs, how many seconds more it has taken."""
        super().__init__(connection, seconds=seconds)
        self._charge = charge

    async def execute(self, statement: Executable, params: Any = None, **options: Any) -> Any:
        """Run ``statement`` and return its result, whose rows are in memory. Raises ``Unavailable`` beyond the limit."""
        is_left = asyncio.Event()
        # Not cancelled with the caller: SQLAlchemy would wait for the thread, and the thread for its statement.
        watched = asyncio.create_task(self._watched(statement, params, options, is_left))
        try:
            await asyncio.wait([watched])
        except asyncio.CancelledError:
            is_left.set()
            await to_its_end(_result(watched))
            raise
        return watched.result()

    async def _watched(
        self, statement: Executable, params: Any, options: Mapping[str, Any], is_left: asyncio.Event
    ) -> Any:
        """Run the statement, and interrupt it at its limit and once its caller has left."""
        limit = left = self._seconds or SURVEY_SECONDS
        driver: Any = (await self._connection.get_raw_connection()).driver_connection
        running = asyncio.create_task(self._execute(statement, params, options))
        leaving = asyncio.create_task(is_left.wait())
        while not running.done():
            looked = monotonic()
            if left <= 0 or is_left.is_set():
                # A statement that the thread has not begun is not interrupted: it is told again.
                await driver.interrupt()
                await asyncio.wait([running], timeout=LOOKS_EVERY_SECONDS)
            else:
                await asyncio.wait([running, leaving], timeout=LOOKS_EVERY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            # A loop that stood still meanwhile has used no more than a look of the statement's time.
            took = min(monotonic() - looked, LOOKS_EVERY_SECONDS)
            left -= took
            self._charge(took)
        leaving.cancel()
        if running.exception() is not None and left <= 0:
            raise too_slow(limit) from running.exception()
        return running.result()


async def _result(task: asyncio.Task[Any]) -> None:
    """Wait for the task, whatever it ends with."""
    await asyncio.wait([task])
    task.exception()


class Surveys:
    """Sessions on connections of their own to SQLite, for reading: few at a time, and one of each tenant."""

    def __init__(self, url: URL) -> None:
        """``url`` is the database's, whatever driver it names."""
        self.charge: Charge | None = None
        """Charges a tenant with seconds that its surveys have taken: they share the cores with everybody's work."""
        # A connection is made for each survey: a thread that is kept would have to be ended.
        self.engine = create_async_engine(
            url.set(drivername="sqlite+aiosqlite"), poolclass=NullPool, connect_args={"timeout": SQLITE_BUSY_SECONDS}
        )
        clean_parameters(self.engine)
        event.listen(self.engine.sync_engine, "connect", _only_read)
        self._reading = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self.places = FairPlaces(_PLACES, each=1, own=1)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Transaction]:
        """Open a session. Each of its statements sees what is committed. Raises ``Unavailable``."""
        owner, limit = asking(), statement_limit()
        async with survey_place(self.places), AsyncExitStack() as stack:
            connection = self._reading.connect()
            stack.push_async_callback(_close, connection)
            await to_its_end(connection.start())
            session = ThreadTransaction(connection, seconds=limit, charge=partial(self._charge, owner))
            stack.push_async_callback(session.close)
            yield session

    def _charge(self, owner: Owner, seconds: float) -> None:
        # The service's own work and strangers have no account.
        if self.charge is not None and owner:
            self.charge(owner, seconds)


async def _close(connection: AsyncConnection) -> None:
    if connection.sync_connection is not None:
        await to_its_end(connection.close())


def _only_read(connection: Any, _record: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA query_only=ON")
    cursor.close()
    know_every_letter(connection)
