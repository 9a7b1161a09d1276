"""Calls of the ledger and of ``tenants`` over a database with the rows of many years. Their writes are rolled back."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import md5

from sqlalchemy.ext.asyncio import AsyncSession

from bench.ledger.calls import Call, LedgerCalls
from bench.ledger.rows import LedgerRows
from contracts.ids import RequestId, RunId, SamplerId, SessionId, TenantId
from contracts.paths import CheckpointPath, Segment
from store.clock import utc_now
from store.database import Database, create_engine, undo

Within = Callable[[AsyncSession], Awaitable[object]]
"""A call inside an open session or transaction."""


class Undone(Database):
    """A database whose transactions are rolled back at their ends."""

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """Open a transaction as ``Database.write``, and undo it on leaving."""
        async with super().write() as transaction:
            yield transaction
            await undo(transaction)


class Years:
    """The rows that ``filling`` made, by their ids: each of them in its turn, so that no two calls meet the same one."""

    def __init__(self, made: LedgerRows) -> None:
        self._made = made
        self._turn = 0

    def turn(self, most: int) -> int:
        """Return the next number from 1 to ``most``."""
        self._turn += 7919
        return 1 + self._turn % most

    @property
    def tenant(self) -> TenantId:
        """A tenant."""
        return self._made.tenant(self.turn(self._made.tenants) - 1)

    @property
    def name(self) -> str:
        """A tenant's name."""
        return f"tenant{self.turn(self._made.tenants) - 1}"

    @property
    def active(self) -> tuple[TenantId, RunId, int]:
        """A run that is trained, with its tenant and the next seq_id."""
        lane = self._made.active[self.turn(len(self._made.active)) - 1]
        return lane.tenant, lane.run, lane.last_seq_id + 1

    @property
    def waiting(self) -> RunId:
        """A run with pending operations."""
        return RunId(f"{self.live_session}:train:0")

    @property
    def live_session(self) -> SessionId:
        """A session whose client is there."""
        return self._made.session(self.turn(self._made.tenants) - 1)

    @property
    def live_sampler(self) -> tuple[TenantId, SamplerId, RunId]:
        """A live sampler of such a session, with its tenant and its run."""
        number = self.turn(self._made.tenants) - 1
        session = self._made.session(number)
        return self._made.tenant(number), SamplerId(f"{session}:sample:1"), RunId(f"{session}:train:0")

    @property
    def finished(self) -> tuple[TenantId, RequestId]:
        """A finished operation, with its tenant."""
        return self._made.finished[self.turn(len(self._made.finished)) - 1]

    @property
    def old_session(self) -> tuple[TenantId, SessionId]:
        """A session of years ago, with its tenant. It has a run."""
        number = 10 * self.turn(self._made.rows // 10)
        return self._made.tenant(number % self._made.tenants), SessionId(_md5(f"s{number}"))

    @property
    def old_run(self) -> tuple[TenantId, RunId]:
        """A run of that session."""
        tenant, session = self.old_session
        return tenant, RunId(f"{session}:train:0")

    @property
    def old_sampler(self) -> tuple[TenantId, SamplerId]:
        """A sampler of that session."""
        tenant, session = self.old_session
        return tenant, SamplerId(f"{session}:sample:0")

    @property
    def old_checkpoint(self) -> tuple[TenantId, str, CheckpointPath]:
        """A checkpoint of years ago that has not expired: its tenant, its id and its path."""
        place = 0
        while place % 8 == 0:
            number = self.turn(self._made.rows)
            place = 1 + number * (self._made.rows // 10) // (self._made.rows + 1)
        run = RunId(f"{_md5(f's{10 * place}')}:train:0")
        path = CheckpointPath(run, Segment.SAMPLER_WEIGHTS, f"v{number}")
        return self._made.tenant(10 * place % self._made.tenants), _md5(f"c{number}"), path


@dataclass(frozen=True, slots=True)
class Timed:
    """A call to be timed, and the database whose single connection it uses."""

    name: str
    call: Call
    database: Database
    is_of_ledger: bool


class GrowthCalls:
    """Every call that the benchmark times, over one database."""

    def __init__(self, url: str, made: LedgerRows, ledger: "Group", tenants: "Group") -> None:
        self.life = LedgerCalls(url, made, utc_now)
        self._database = Undone(create_engine(url))
        years = Years(made)
        self.all = [
            *(Timed(name, call, self.life.database, True) for name, call in self.life.others().items()),
            *self._of(*ledger(self.life, years), is_of_ledger=True),
            *self._of(*tenants(self.life, years), is_of_ledger=False),
        ]

    def _of(self, reads: "Named", writes: "Named", *, is_of_ledger: bool) -> Iterator[Timed]:
        for calls, opened in ((reads, self._database.read), (writes, self._database.write)):
            for name, call in calls.items():
                yield Timed(name, partial(_within, opened, call), self._database, is_of_ledger)

    async def close(self) -> None:
        """Close the connections."""
        await self._database.close()
        await self.life.close()


async def _within(opened: Callable[[], AbstractAsyncContextManager[AsyncSession]], call: Within) -> None:
    async with opened() as session:
        await call(session)


Named = Mapping[str, Within]
Group = Callable[[LedgerCalls, Years], tuple[Named, Named]]
"""Makes the reading and the writing calls of one package, by name."""


def _md5(text: str) -> str:
    return md5(text.encode(), usedforsecurity=False).hexdigest()
