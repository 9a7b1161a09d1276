"""Acceptance of sample requests within their tenants' limits: requests that arrive together share one transaction."""

from collections.abc import Sequence
from functools import partial
from time import time

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, TooManySamples, WeftError
from contracts.ids import RequestId
from contracts.ledger_records import NewOperation, OperationState
from contracts.sample_demand import SampleDemand
from ledger import statements as sql
from ledger.ledger import Ledger
from ledger.rows import new_row, payload_row
from ledger.wakeups import sampling_topic
from store.batcher import Batcher, few_lengths
from store.clock import Clock
from store.database import Database, after_commit
from telemetry.telemetry import Telemetry
from tenants.limit_use import SAMPLE_USE, Use
from tenants.limits import Counted, Limits, hold_count


class SampleIntake:
    """Accepts samples in batches. A sample that is refused does not affect the others of its batch."""

    def __init__(
        self, database: Database, ledger: Ledger, clock: Clock, telemetry: Telemetry, *, defaults: Limits
    ) -> None:
        """``defaults`` are the limits of a tenant without values of its own."""
        self._database = database
        self._ledger = ledger
        self._clock = clock
        self._telemetry = telemetry
        self._defaults = defaults
        self._batcher: Batcher[NewOperation, RequestId] = Batcher(self._accept)

    async def accept(self, sample: NewOperation) -> RequestId:
        """Record ``sample`` and return its request id; a repeated request gets its first id. Committed on return.

        Raises ``SequenceConflict``, ``InvalidRequest`` for a sample that is too large for its tenant's limits, and
        ``TooManySamples``, on which the SDK sends the request again later.
        """
        started = time()
        request_id = await self._batcher.ask(sample)
        if self._telemetry.traces.is_on:
            self._telemetry.accepted(request_id, sample.kind, started=started)
        return request_id

    async def _accept(self, samples: Sequence[NewOperation]) -> list[RequestId | WeftError]:
        async with self._database.write() as transaction:
            tenants = {sample.tenant for sample in samples}
            await hold_count(transaction, Counted.SAMPLES, tenants)
            uses = await SAMPLE_USE.read(transaction, tenants, self._defaults)
            fitting: list[NewOperation] = []
            refused: dict[int, WeftError] = {}
            for sample in samples:
                refusal = _refusal(sample, uses[sample.tenant])
                if refusal is None:
                    fitting.append(sample)
                else:
                    refused[id(sample)] = refusal
            ids = await self._insert(transaction, fitting)
            for base_model in {sample.base_model for sample in fitting}:
                after_commit(transaction, partial(self._ledger.wakeups.announce, sampling_topic(base_model)))
            return [
                ids.get(id(sample)) or await self._earlier(transaction, sample, refused.get(id(sample)))
                for sample in samples
            ]

    async def _insert(self, transaction: AsyncSession, samples: Sequence[NewOperation]) -> dict[int, RequestId]:
        """Insert the samples and return their request ids by ``id(sample)``, leaving out samples whose keys exist."""
        if not samples:
            return {}
        now = self._clock()
        # Sorted by key, so that two processes that insert the same keys cannot deadlock.
        ordered = sorted(samples, key=lambda sample: (sample.lane, sample.seq_id))
        rows = {id(sample): new_row(sample, now, OperationState.PENDING) for sample in ordered}
        dialect = transaction.get_bind().dialect.name
        if len(rows) == 1:
            inserted = set(await transaction.scalars(sql.INSERT_UNLESS_PRESENT[dialect], *rows.values()))
        else:
            await transaction.execute(sql.INSERT_MANY_UNLESS_PRESENT[dialect], list(rows.values()))
            ids = few_lengths([row["id"] for row in rows.values()])
            inserted = set((await transaction.execute(sql.PRESENT, {"ids": ids})).scalars())
        new = {key: RequestId(str(row["id"])) for key, row in rows.items() if row["id"] in inserted}
        payloads = [payload_row(sample) for sample in ordered if id(sample) in new]
        if payloads:
            await transaction.execute(sql.INSERT_PAYLOAD, payloads)
        return new

    async def _earlier(
        self, session: AsyncSession, sample: NewOperation, refusal: WeftError | None
    ) -> RequestId | WeftError:
        """Return the id of the request that ``sample`` repeats, or the error that answers it."""
        try:
            earlier = await self._ledger.find(session, lane=sample.lane, seq_id=sample.seq_id, digest=sample.digest)
        except WeftError as conflict:
            return conflict
        return earlier or refusal or TooManySamples("the sample was not recorded; send it again")


def _refusal(sample: NewOperation, use: Use) -> WeftError | None:
    """Return the error of a sample that does not fit into its tenant's limits; else count it to ``use``."""
    demand = sample.demand or SampleDemand(0, 0)
    most_work, most_tokens = use.limits.sample_work, use.limits.sample_tokens
    if demand.work > most_work:
        return InvalidRequest(
            f"num_samples x max_tokens x topk is {demand.work} with this prompt's logprobs, and your limit is "
            f"{most_work}; lower one of them, or send several requests"
        )
    if demand.tokens > most_tokens:
        return InvalidRequest(
            f"this sample may take {demand.tokens} tokens, and your limit for all pending samples together is "
            f"{most_tokens}; lower num_samples or max_tokens"
        )
    if use.room("pending_samples") < 1:
        return TooManySamples(
            f"{use.limits.pending_samples} sample requests are pending; send this one again when some have ended"
        )
    if use.room("sample_tokens") < demand.tokens:
        return TooManySamples(
            f"pending sample requests may take {use.used['sample_tokens']} of {most_tokens} tokens, and this one "
            f"{demand.tokens}; send it again when some have ended"
        )
    use.used["pending_samples"] += 1
    use.used["sample_tokens"] += demand.tokens
    return None
