"""The ledger's hot calls over a filled database: each alone, and the whole life of an operation."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from time import perf_counter

import numpy as np
from sqlalchemy.ext.asyncio import AsyncSession

from bench.ledger.rows import BASE_MODEL, GRACE, LEASE, LedgerRows, a_batch, a_pass_result
from contracts.codec import pack, request_digest
from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import Completion, NewOperation, OperationStatus, ReadyOperation, StoredPayload
from contracts.operations import OperationKind, SampleRequest
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.pruning import prune
from ledger.queue_depth import read_queue
from ledger.sample_claims import (
    claim_samples,
    gates_that_hold,
    give_back,
    release_held,
    return_samples_of,
    return_strays,
    waiting_samples,
)
from ledger.wakeups import Wakeups
from store.clock import Clock, utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.settings import Settings
from telemetry.telemetry import Telemetry
from tenants.limit_use import SAMPLE_USE
from tenants.limits import Limits

Call = Callable[[], Awaitable[object]]
_DEFAULTS = Limits.of(Settings())


class _UndoneError(Exception):
    """Error that rolls a transaction back."""


def _no_files() -> PayloadFiles:
    """Return payload files in a folder that stays empty: no payload here is large."""
    return PayloadFiles(DataFolder(Path(gettempdir())))


class LedgerCalls:
    """Calls of one service over one database. Operations are accepted for the runs in ``made.active``."""

    def __init__(self, url: str, made: LedgerRows, clock: Clock) -> None:
        self._made = made
        self._clock = clock
        self.database = Database(create_engine(url))
        self.ledger = Ledger(self.database, Wakeups(), clock, Telemetry.of("bench", clock), _no_files())
        self._next = {lane.run: lane.last_seq_id + 1 for lane in made.active}
        self._asked = 0
        self.last_position = made.rows
        """Position of a trainer that has read all operations."""

    @property
    def lanes(self) -> Sequence[tuple[TenantId, RunId]]:
        """Tenant and active run, for each tenant."""
        return [(lane.tenant, lane.run) for lane in self._made.active]

    async def close(self) -> None:
        """Close the connections."""
        await self.database.close()

    # --- one operation ---------------------------------------------------------------------------------------------

    async def accept(self, tenant: TenantId, run: RunId) -> RequestId:
        """Accept a ``forward_backward`` for the next seq_id of ``run``, and return its id."""
        seq_id = self._next[run]
        self._next[run] += 1
        packed = pack(a_batch())
        kind = OperationKind.FORWARD_BACKWARD
        new = NewOperation(
            tenant,
            run,
            seq_id,
            kind,
            BASE_MODEL,
            StoredPayload(packed),
            request_digest(kind, packed),
            tokens=32,
            trainer=LEASE.trainer,
        )
        async with self.database.write() as transaction:
            return await self.ledger.accept(transaction, new)

    async def look(self, after_position: int) -> int:
        """Read the operations that are pending after a position; return the last one's position."""
        async with self.database.read() as session:
            found = await self.ledger.pending_training(
                session, BASE_MODEL, trainer=LEASE.trainer, after_position=after_position
            )
        return found[-1].position if found else after_position

    async def load(self, ids: Sequence[RequestId]) -> list[ReadyOperation]:
        """Return operations with their payloads."""
        async with self.database.read() as session:
            return [replace(one, lease=LEASE) for one in await self.ledger.load(session, ids)]

    async def complete(self, operations: Sequence[ReadyOperation]) -> None:
        """Write the results of passes."""
        async with self.database.write() as transaction:
            await self._complete(transaction, operations)

    async def _complete(self, transaction: AsyncSession, operations: Sequence[ReadyOperation]) -> None:
        await self.ledger.complete(transaction, [Completion(one, a_pass_result()) for one in operations])

    async def poll(self, tenant: TenantId, request: RequestId) -> OperationStatus:
        """Read the status as ``retrieve_future`` does first."""
        return await self.ledger.status(tenant, request)

    async def retrieve(self, tenant: TenantId, request: RequestId) -> None:
        """Wait for the end, which has come, and read the result. Raises ``RuntimeError`` when there is no result."""
        status = await self.ledger.wait_until_final(tenant, request, seconds=10)
        if await self.ledger.result(tenant, status) is None:
            raise RuntimeError(f"operation {request} has no result")

    async def life(self, tenant: TenantId, run: RunId) -> dict[str, float]:
        """Take an operation from acceptance to result, with a poll between. Return milliseconds of each part and ``life``."""
        times: dict[str, float] = {}
        started = perf_counter()

        def lap(name: str) -> None:
            times[name] = (perf_counter() - started) * 1e3 - sum(times.values())

        request = await self.accept(tenant, run)
        lap("accept")
        await self.poll(tenant, request)
        lap("poll")
        self.last_position = max(self.last_position, await self.look(self.last_position))
        lap("look")
        loaded = await self.load([request])
        lap("load")
        await self.complete(loaded)
        lap("complete")
        await self.retrieve(tenant, request)
        lap("retrieve")
        times["life"] = sum(times.values())
        return times

    # --- calls beside it -------------------------------------------------------------------------------------------

    def others(self) -> dict[str, Call]:
        """Return the hot calls that are not a part of ``life``. Their writes are rolled back."""
        return {
            "poll_any_age": self._poll_any_age,
            "take_samples": self._claim_samples,
            "give_back_samples": self._return_samples,
            "waiting_samples": self._waiting_samples,
            "has_room": self._has_room,
            "accept_sample": self._accept_sample,
            "operations_to_replay": self._replay,
            "lane_positions": self._lane_positions,
            "look_from_start": lambda: self.look(0),
            "prune": self._prune,
            "read_queue": lambda: read_queue(self.database, self._clock),
        }

    def _any_lane(self) -> tuple[TenantId, RunId]:
        self._asked += 1
        lane = self._made.active[self._asked % len(self._made.active)]
        return lane.tenant, lane.run

    async def _poll_any_age(self) -> None:
        self._asked += 7919
        await self.poll(*self._made.finished[self._asked % len(self._made.finished)])

    async def _waiting_samples(self) -> list[RequestId]:
        async with self.database.read() as session:
            found = (await waiting_samples(session, BASE_MODEL, of_each=16, now=utc_now())).of
        return [sample.id for samples in found.values() for sample in samples]

    async def _claim_samples(self) -> None:
        wanted = await self._waiting_samples()
        async with self._undone() as transaction:
            claims = await claim_samples(transaction, wanted[:64], process="a pool")
            await give_back(transaction, claims, process="a pool", gate=self._any_lane()[1])
            await gates_that_hold(transaction, BASE_MODEL)
            await release_held(transaction, BASE_MODEL, [self._any_lane()[1]])

    async def _return_samples(self) -> None:
        async with self._undone() as transaction:
            await return_strays(transaction, process="a pool", but=["one in hand"])
            await return_samples_of(transaction, ["a pool"])

    async def _has_room(self) -> None:
        tenant, _ = self._any_lane()
        async with self.database.read() as session:
            await SAMPLE_USE.of(session, tenant, _DEFAULTS)

    async def _accept_sample(self) -> None:
        tenant, run = self._any_lane()
        packed, kind = pack(SampleRequest(np.arange(32, dtype=np.int64))), OperationKind.SAMPLE
        lane = run.replace(":train:", ":sample:")
        new = NewOperation(tenant, lane, 2**60, kind, BASE_MODEL, StoredPayload(packed), request_digest(kind, packed))
        async with self._undone() as transaction:
            await self.ledger.accept(transaction, new)

    async def _replay(self) -> None:
        _, run = self._any_lane()
        before = self._next[run]
        async with self.database.read() as session:
            await self.ledger.operations_to_replay(
                session, run, "a trainer", after_seq_id=before - 32, before_seq_id=before
            )

    async def _lane_positions(self) -> None:
        async with self.database.read() as session:
            await self.ledger.lane_positions(session, [run for _, run in self.lanes])

    async def _prune(self) -> None:
        async with self._undone() as transaction:
            await prune(transaction, finished_before=self._made.now - GRACE, now=self._made.now)

    async def complete_undone(self, operations: Sequence[ReadyOperation]) -> None:
        """Run ``complete`` and roll it back."""
        async with self._undone() as transaction:
            await self._complete(transaction, operations)

    @asynccontextmanager
    async def _undone(self) -> AsyncIterator[AsyncSession]:
        try:
            async with self.database.write() as transaction:
                yield transaction
                raise _UndoneError
        except _UndoneError:
            return


async def at_once(calls: LedgerCalls, tenants: int, seconds: float) -> tuple[int, list[float]]:
    """Return how many operations ``tenants`` tenants bring to their results in ``seconds``, and each poll's milliseconds."""
    until = perf_counter() + seconds
    polls: list[float] = []

    async def work(tenant: TenantId, run: RunId) -> int:
        lives = 0
        while perf_counter() < until:
            polls.append((await calls.life(tenant, run))["poll"])
            lives += 1
        return lives

    done = await asyncio.gather(*(work(tenant, run) for tenant, run in calls.lanes[:tenants]))
    return sum(done), polls
