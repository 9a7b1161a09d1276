"""Acceptance of sample requests: requests that arrive together share one transaction."""

from collections.abc import Collection, Sequence
from functools import partial
from time import time

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.codec import encode
from contracts.errors import TooManySamples, WeftError
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import NewOperation, OperationState
from ledger import statements as sql
from ledger.ledger import Ledger
from ledger.rows import new_row
from ledger.wakeups import sampling_topic
from store.batcher import Batcher, few_lengths
from store.clock import Clock
from store.database import Database, after_commit
from telemetry.telemetry import Telemetry


class SampleIntake:
    """Accepts samples in batches. A sample that is refused does not affect the others of its batch."""

    def __init__(
        self, database: Database, ledger: Ledger, clock: Clock, telemetry: Telemetry, *, most_pending: int
    ) -> None:
        """``most_pending`` is the number of samples that one tenant may have pending."""
        self._database = database
        self._ledger = ledger
        self._clock = clock
        self._telemetry = telemetry
        self._most = most_pending
        self._batcher: Batcher[NewOperation, RequestId] = Batcher(self._accept)

    async def accept(self, sample: NewOperation) -> RequestId:
        """Record ``sample`` and return its request id; a repeated request gets its first id. Committed on return.

        Raises ``SequenceConflict``, and ``TooManySamples``, on which the SDK sends the request again later.
        """
        started = time()
        request_id = await self._batcher.ask(sample)
        if self._telemetry.traces.is_on:
            self._telemetry.accepted(request_id, sample.kind, started=started)
        return request_id

    async def _accept(self, samples: Sequence[NewOperation]) -> list[RequestId | WeftError]:
        async with self._database.write() as transaction:
            room = await self._room(transaction, {sample.tenant for sample in samples})
            fitting: list[NewOperation] = []
            for sample in samples:
                if room[sample.tenant] > 0:
                    room[sample.tenant] -= 1
                    fitting.append(sample)
            ids = await self._insert(transaction, fitting)
            for base_model in {sample.base_model for sample in fitting}:
                after_commit(transaction, partial(self._ledger.wakeups.announce, sampling_topic(base_model)))
            return [ids.get(id(sample)) or await self._earlier(transaction, sample) for sample in samples]

    async def _room(self, session: AsyncSession, tenants: Collection[TenantId]) -> dict[TenantId, int]:
        found = {}
        for tenant in tenants:
            keys = {"tenant": tenant, "at_most": self._most}
            found[tenant] = self._most - (await session.scalar(sql.SAMPLES_PENDING, keys) or 0)
        return found

    async def _insert(self, transaction: AsyncSession, samples: Sequence[NewOperation]) -> dict[int, RequestId]:
        """Insert the samples and return their request ids by ``id(sample)``, leaving out samples whose keys exist."""
        if not samples:
            return {}
        now = self._clock()
        # Sorted by key, so that two processes that insert the same keys cannot deadlock.
        ordered = sorted(samples, key=lambda sample: (sample.lane, sample.seq_id))
        rows = {id(sample): new_row(sample, now, OperationState.PENDING) for sample in ordered}
        statement = sql.INSERT_MANY_UNLESS_PRESENT[transaction.get_bind().dialect.name]
        await transaction.execute(statement, list(rows.values()))
        ids = few_lengths([row["id"] for row in rows.values()])
        inserted = set((await transaction.execute(sql.PRESENT, {"ids": ids})).scalars())
        new = {key: RequestId(str(row["id"])) for key, row in rows.items() if row["id"] in inserted}
        payloads = [
            {"operation_id": new[id(sample)], "tenant_id": sample.tenant, "body": encode(sample.payload)}
            for sample in ordered
            if id(sample) in new
        ]
        if payloads:
            await transaction.execute(sql.INSERT_PAYLOAD, payloads)
        return new

    async def _earlier(self, session: AsyncSession, sample: NewOperation) -> RequestId | WeftError:
        try:
            earlier = await self._ledger.find(session, lane=sample.lane, seq_id=sample.seq_id, digest=sample.digest)
        except WeftError as conflict:
            return conflict
        return earlier or TooManySamples(
            f"{self._most} sample requests are pending; send this one again when some have ended"
        )
