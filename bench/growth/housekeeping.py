"""Housekeeping over the rows of many years, step by step, and the rows that it leaves."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psycopg
from sqlalchemy import make_url, update

from bench.ledger.benchmark import server_url
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.publication import LocalPublication
from ledger.runtime import Runtime
from ledger.token_feed import TokenFeed
from ledger.wakeups import Wakeups
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.settings import Settings
from store.tables import ServicePresence
from telemetry.telemetry import Telemetry
from workers.housekeeping.housekeeping import Housekeeping
from workers.housekeeping.presence import PresenceNotes
from workers.housekeeping.records import StepRecord
from workers.housekeeping.schedule import StepName

_YEAR = timedelta(days=365)
TABLES = (
    "sessions",
    "samplers",
    "runs",
    "checkpoints",
    "operations",
    "adapter_gates",
    "operation_payloads",
    "operation_results",
    "run_events",
    "discarded_folders",
)


@dataclass
class Kept:
    """Runs of a step: the longest, their number, the rows that they deleted or changed, and their seconds."""

    longest: float = 0.0
    runs: int = 0
    rows: int = 0
    seconds: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Add a run."""
        self.longest = max(self.longest, record.seconds)
        self.runs, self.rows, self.seconds = self.runs + 1, self.rows + record.handled, self.seconds + record.seconds


@dataclass
class Grown:
    """Outcome of housekeeping on the large database."""

    steps: dict[StepName, Kept] = field(default_factory=dict)
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rows of each table, before and after."""


def counted(url: str) -> dict[str, int]:
    """Return the number of rows of each table."""
    with psycopg.connect(server_url(make_url(url)), autocommit=True) as connection:
        counts = {}
        for table in TABLES:
            (counts[table],) = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone() or (0,)
    return counts


async def keep_house(url: str, most_runs: int, folder: Path) -> Grown:
    """Run every step until it has nothing left to do. Raises what a step raises."""
    grown = Grown({step: Kept() for step in StepName})
    before = counted(url)
    database = Database(create_engine(url))
    runtime = _runtime(database, folder)
    housekeeping = Housekeeping(runtime, lambda: False)
    try:
        await PresenceNotes(runtime).note()
        async with database.write() as transaction:
            # As of a service that clients could reach all the while: else nobody's time has passed.
            await transaction.execute(update(ServicePresence).values(back_at=utc_now() - _YEAR))
        for _ in range(2):
            # Twice: what one step leaves is another's to delete.
            for step in StepName:
                for _ in range(most_runs):
                    record = await housekeeping.run_step(step)
                    grown.steps[step].add(record)
                    if record.position is None:
                        break
    finally:
        await database.close()
    after = counted(url)
    grown.rows = {table: (before[table], after[table]) for table in TABLES}
    return grown


def _runtime(database: Database, folder: Path) -> Runtime:
    data_folder, wakeups, telemetry = DataFolder(folder), Wakeups(), Telemetry.of("bench", utc_now)
    return Runtime(
        settings=Settings(data_dir=folder),
        database=database,
        ledger=Ledger(database, wakeups, utc_now, telemetry, PayloadFiles(data_folder)),
        wakeups=wakeups,
        feed=TokenFeed(),
        publication=LocalPublication(),
        data_folder=data_folder,
        clock=utc_now,
        telemetry=telemetry,
    )
