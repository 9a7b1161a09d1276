"""The service after years of use: ``python -m bench.growth``.

Makes two throw-away databases on a PostgreSQL server, one with ten thousand sessions, samplers, checkpoints and operations,
one with a million of each, and a tenth as many runs and gates. Times the ledger's calls on both in turns. Then lets
housekeeping work the large one off, step by step, and counts what is left. Prints tables and, last, one JSON line:

- ``sweep_max_s``: the longest run of a step, in seconds.
- ``ratio_max``: of all calls, the largest ratio of medians, large to small.
- ``rows_left``: rows that stay in each table once no step has anything left to do.

Nothing else should run meanwhile.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import psycopg
import uvloop
from sqlalchemy import make_url

from bench.ledger.benchmark import Filled, filled_database, one_turn, server_url
from bench.ledger.calls import LedgerCalls
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
from telemetry.telemetry import Telemetry
from workers.housekeeping.housekeeping import Housekeeping
from workers.housekeeping.presence import PresenceNotes
from workers.housekeeping.records import StepRecord
from workers.housekeeping.schedule import StepName

TENANTS = 64
PENDING = 64
"""Pending operations at every size: how many wait does not grow with the years."""
TABLES = ("sessions", "samplers", "runs", "checkpoints", "operations", "adapter_gates", "operation_payloads")

_FILL = """
INSERT INTO sessions (id, tenant_id, tags, sdk_version, created_at, last_seen_at, ended_at, end_reason)
SELECT md5('s' || i), lpad(to_hex(i % {tenants}), 32, '0'), '[]', '0.38.0', at, at, CASE WHEN i % 1000 > 0 THEN at END,
  'timed_out'
FROM (SELECT i, now() - interval '120 days' * (1 - i / {rows}.0) - interval '2 hours' AS at
  FROM generate_series(1, {rows}) i) made;

INSERT INTO runs (id, tenant_id, session_id, model_seq_id, base_model, rank, alpha, seed, train_attn, train_mlp, train_unembed,
  state, next_seq_id, snapshot_seq_id, snapshot_dir, created_at, last_request_at)
SELECT id || ':train:0', tenant_id, id, 0, 'old', 8, 32, 1, true, true, true,
  CASE WHEN ended_at IS NULL OR n % 50 = 0 THEN 'ready' ELSE 'unloaded' END, 1, 0,
  CASE WHEN n % 20 = 0 THEN 'snapshots/' || id END, created_at, last_seen_at
FROM (SELECT *, row_number() OVER (ORDER BY created_at) AS n FROM sessions WHERE end_reason = 'timed_out') made WHERE n % 10 = 0;

INSERT INTO adapter_gates (run_id, tenant_id, base_model, generation, since)
SELECT id, tenant_id, base_model, 1, created_at FROM runs WHERE base_model = 'old';

INSERT INTO checkpoints (id, tenant_id, run_id, segment, name, directory, size_bytes, listed, public, created_at, expires_at)
SELECT md5('c' || i), tenant_id, run, 'sampler_weights', 'v' || i, 'checkpoints/' || md5('c' || i), 1, n % 4 = 0, false,
  created_at + interval '1 minute', CASE WHEN n % 8 = 0 THEN now() - interval '1 hour' END
FROM (SELECT i, n, runs.id AS run, runs.tenant_id, runs.created_at FROM generate_series(1, {rows}) i
  JOIN (SELECT *, row_number() OVER (ORDER BY created_at) AS n FROM runs WHERE base_model = 'old') runs
  ON runs.n = 1 + i * (SELECT count(*) FROM runs WHERE base_model = 'old') / ({rows} + 1)) made;

INSERT INTO samplers (id, tenant_id, session_id, sampling_session_seq_id, base_model, checkpoint_id, created_at)
SELECT sessions.id || ':sample:0', sessions.tenant_id, sessions.id, 0, 'old', md5('c' || n), sessions.created_at
FROM (SELECT *, row_number() OVER (ORDER BY created_at) AS n FROM sessions WHERE end_reason = 'timed_out') sessions;

UPDATE operations SET created_at = created_at - interval '3 days', finished_at = finished_at - interval '3 days',
  pruned_at = pruned_at - interval '3 days' WHERE pruned_at IS NOT NULL;
"""


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


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--database", default="postgresql+asyncpg://postgres@127.0.0.1:5432/postgres", help="a server's"
    )
    parser.add_argument("--small", type=int, default=10_000, help="rows of each table")
    parser.add_argument("--large", type=int, default=1_000_000, help="rows of each table")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each database, of five operations")
    parser.add_argument("--most-runs", type=int, default=2000, help="of each step of housekeeping")
    return parser.parse_args()


def fill(url: str, rows: int, tenants: int = TENANTS) -> None:
    """Add the rows of many years to a database that has ``tenants`` tenants and the newest schema."""
    started = perf_counter()
    with psycopg.connect(server_url(make_url(url)), autocommit=True) as connection:
        for statement in _FILL.format(rows=rows, tenants=tenants).split(";"):
            if statement.strip():
                connection.execute(statement.encode())
        connection.execute("VACUUM ANALYZE")
    print(f"{rows:,} rows of each table written in {perf_counter() - started:.0f} s", flush=True)


def counted(url: str) -> dict[str, int]:
    """Return the number of rows of each table."""
    with psycopg.connect(server_url(make_url(url)), autocommit=True) as connection:
        counts = {}
        for table in TABLES:
            (counts[table],) = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone() or (0,)
    return counts


async def time_calls(databases: Sequence[Filled], rounds: int) -> None:
    """Time the ledger's calls on the databases, in turns."""
    opened = [(one, LedgerCalls(one.url, one.made, utc_now)) for one in databases]
    try:
        for filled, calls in opened:
            await one_turn(filled, calls, 0)
            filled.times.clear()
        for number in range(rounds):
            for filled, calls in opened if number % 2 == 0 else opened[::-1]:
                await one_turn(filled, calls, number)
    finally:
        for _, calls in opened:
            await calls.close()


async def keep_house(url: str, most_runs: int, folder: Path) -> Grown:
    """Run every step until it has nothing left to do. Raises what a step raises."""
    grown = Grown({step: Kept() for step in StepName})
    before = counted(url)
    database = Database(create_engine(url))
    runtime = _runtime(database, folder)
    housekeeping = Housekeeping(runtime, lambda: False)
    try:
        await PresenceNotes(runtime).note()
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


def print_tables(small: Filled, large: Filled, grown: Grown) -> None:
    """Print the table of calls, the table of steps, then the table of rows."""
    print(f"\n{'call':24}{'small ms':>10}{'large ms':>10}{'ratio':>8}")
    for name in small.times:
        before, after = small.median(name), large.median(name)
        print(f"{name:24}{before:10.2f}{after:10.2f}{after / before:8.2f}")
    print(f"\n{'step':24}{'runs':>8}{'rows':>12}{'seconds':>10}{'longest s':>12}")
    for step, kept in grown.steps.items():
        print(f"{step:24}{kept.runs:8}{kept.rows:12,}{kept.seconds:10.1f}{kept.longest:12.2f}")
    print(f"\n{'table':24}{'before':>12}{'after':>12}")
    for table, (before_rows, after_rows) in grown.rows.items():
        print(f"{table:24}{before_rows:12,}{after_rows:12,}")


def figures(small: Filled, large: Filled, grown: Grown) -> dict[str, object]:
    """Return the figures of the JSON line."""
    ratios = {name: large.median(name) / small.median(name) for name in small.times}
    return {
        "sweep_max_s": round(max(kept.longest for kept in grown.steps.values()), 3),
        "ratio_max": round(max(ratios.values()), 3),
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "steps_max_s": {step.value: round(kept.longest, 3) for step, kept in grown.steps.items()},
        "rows_left": {table: after for table, (_, after) in grown.rows.items()},
    }


def main() -> None:
    """Measure and print."""
    options = parse_options()
    server = make_url(options.database)
    with ExitStack() as stack:
        small, large = (
            stack.enter_context(filled_database(server, rows, TENANTS, pending=PENDING))
            for rows in (options.small, options.large)
        )
        for filled in (small, large):
            fill(filled.url, filled.made.rows)
        uvloop.run(time_calls([small, large], options.rounds))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        grown = asyncio.run(keep_house(large.url, options.most_runs, folder))
        print_tables(small, large, grown)
        print(json.dumps(figures(small, large, grown)), flush=True)


if __name__ == "__main__":
    main()
