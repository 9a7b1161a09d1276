"""Two tenants with operations that have ended, for tests of usage."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from sqlalchemy import insert

from contracts.ids import SessionId, TenantId
from contracts.ledger_records import OperationState
from contracts.operations import LoraSettings
from contracts.paths import Segment
from ledger.pruning import prune
from store.database import Database
from store.tables import Operation
from tenants.checkpoints import NewCheckpoint, new_checkpoint_id, record_checkpoint
from tenants.presence import note_presence
from tenants.runs import NewRun
from tenants.storage_hours import begin_walk, meter_storage
from tenants.usage_hours import BucketWidth, Dimension, UsageLine, usage_lines
from testing.runs import create_run

NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)


@dataclass
class Books:
    """Two tenants with a session each, and ways to end operations."""

    database: Database
    tenants: list[TenantId] = field(default_factory=list)
    sessions: list[SessionId] = field(default_factory=list)
    rows: int = 0

    async def ended(self, who: int, at: datetime, **columns: object) -> None:
        """Record an operation that ended ``at``; a pass of 10 tokens by default."""
        self.rows += 1
        row = {
            "id": f"operation-{self.rows}",
            "tenant_id": self.tenants[who],
            "lane": f"{self.sessions[who]}:train:0",
            "seq_id": self.rows,
            "kind": "forward_backward",
            "base_model": "tiny",
            "state": OperationState.DONE,
            "body_digest": b"",
            "tokens": 10,
            "created_at": at,
            "finished_at": at,
        }
        async with self.database.write() as transaction:
            await transaction.execute(insert(Operation), [row | columns])

    async def sampled(self, who: int, at: datetime, **columns: object) -> None:
        """Record a sample of 6 prompt tokens, 4 of them cached, and 5 drawn ones, for the key 7."""
        sample = {"lane": f"{self.sessions[who]}:sample:1", "kind": "sample", "key_id": 7}
        await self.ended(who, at, **sample | {"tokens": 11, "sampled_tokens": 5, "cached_tokens": 4} | columns)

    async def lines(self, who: int = 0, *by: Dimension, width: BucketWidth = BucketWidth.HOUR) -> list[UsageLine]:
        async with self.database.read() as session:
            day = timedelta(days=1)
            return await usage_lines(
                session, self.tenants[who], since=NOON - day, before=NOON + day, by=by, width=width, limit=100
            )

    async def stored(self, who: int, nbytes: int) -> None:
        """Record a checkpoint of so many bytes."""
        async with self.database.write() as transaction:
            new = NewRun(self.sessions[who], 0, "tiny", LoraSettings(rank=8, seed=1), None)
            run = await create_run(transaction, self.tenants[who], new, lambda: NOON)
            id = new_checkpoint_id()
            saved = NewCheckpoint(
                id, run, Segment.WEIGHTS, "one", nbytes, ttl_seconds=None, listed=True, user_metadata=None
            )
            await record_checkpoint(transaction, self.tenants[who], saved, lambda: NOON)

    async def metered(self, now: datetime) -> None:
        """Read what everybody stores, as housekeeping does ``now``."""
        async with self.database.write() as transaction:
            await note_presence(transaction, now=now, session_timeout=timedelta(hours=1))
            walk = await begin_walk(transaction, now)
            assert (await meter_storage(transaction, walk, most=100))[1] is None

    async def prune(self, before: datetime) -> None:
        async with self.database.write() as transaction:
            await prune(transaction, finished_before=before, now=NOON)
