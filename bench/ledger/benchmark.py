"""The ledger's cost with a long history and many tenants: ``python -m bench.ledger``.

Makes two throw-away databases on a PostgreSQL server, one with 10 thousand operations and one with a million, and takes
turns between them: the life of a training operation through ``ledger``, each hot call alone, and lives of 1 to 64
tenants at once. Explains every statement of these calls on the large one. Prints tables and, last, one JSON line.
Milliseconds are medians as the caller sees them. Nothing else should run meanwhile.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import psycopg
import uvloop
from sqlalchemy import URL, make_url

from bench.ledger.calls import LedgerCalls, at_once
from bench.ledger.plans import Sent, explain, hot_statements, is_sequential, rows_in_vain
from bench.ledger.rows import LedgerRows, copy_into
from migrations.upgrade import upgrade
from store.clock import utc_now
from testing.throwaway_database import throwaway_database

_LONGEST_LINE = 150
_LIVES_IN_A_TURN = 5
_ROUNDS_AT_ONCE = 3


@dataclass
class Filled:
    """A filled database, and the measurements on it, in milliseconds by call."""

    url: str
    made: LedgerRows
    times: dict[str, list[float]] = field(default_factory=dict)
    polls: dict[int, list[float]] = field(default_factory=dict)
    """Milliseconds of each poll, by number of tenants working at once."""
    rates: dict[int, list[float]] = field(default_factory=dict)
    """Operations a second of each round, by number of tenants working at once."""

    def add(self, name: str, milliseconds: float) -> None:
        """Add a measurement of the call ``name``."""
        self.times.setdefault(name, []).append(milliseconds)

    def median(self, name: str) -> float:
        """Return the median of a call's times, in milliseconds."""
        return statistics.median(self.times[name])


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--database", default="postgresql+asyncpg://postgres@127.0.0.1:5432/postgres", help="a server's"
    )
    parser.add_argument("--small", type=int, default=10_000, help="operations; the keys of the JSON line say 10k")
    parser.add_argument("--large", type=int, default=1_000_000, help="operations; the keys of the JSON line say 1m")
    parser.add_argument("--tenants", default="1,4,16,64", help="at once; comma between")
    parser.add_argument("--rounds", type=int, default=100, help="turns of each database, of five lives")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each number of tenants in each of three rounds")
    return parser.parse_args()


def server_url(url: URL) -> str:
    """Return the URL as psycopg reads it."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


@contextmanager
def filled_database(server: URL, rows: int, tenants: int, *, pending: int | None = None) -> Iterator[Filled]:
    """Make a database with ``rows`` operations, the last of which ended just now, and drop it afterwards.

    ``pending`` of the operations are pending; by default one in a thousand.
    """
    with throwaway_database(server_url(server)) as url:
        upgrade(url)
        started = perf_counter()
        made = LedgerRows(rows, tenants, utc_now(), pending=pending)
        with psycopg.connect(server_url(make_url(url)), autocommit=True) as filling:
            copy_into(filling, made)
        print(f"{rows:,} operations written in {perf_counter() - started:.0f} s", flush=True)
        yield Filled(url, made)


async def time_lives(filled: Filled, calls: LedgerCalls, number: int) -> None:
    """Time a few lives of operations, one tenant after another."""
    for step in range(_LIVES_IN_A_TURN):
        lane = calls.lanes[(number * _LIVES_IN_A_TURN + step) % len(calls.lanes)]
        for name, milliseconds in (await calls.life(*lane)).items():
            filled.add(name, milliseconds)


async def one_turn(filled: Filled, calls: LedgerCalls, number: int) -> None:
    """Time a few lives of operations, and every other call once."""
    await time_lives(filled, calls, number)
    for name, call in calls.others().items():
        started = perf_counter()
        await call()
        filled.add(name, (perf_counter() - started) * 1e3)


async def measure(databases: Sequence[Filled], options: argparse.Namespace) -> list[Sent]:
    """Time all calls on all databases. Return the statements that the calls sent to the last database."""
    opened = [(one, LedgerCalls(one.url, one.made, utc_now)) for one in databases]
    try:
        for filled, calls in opened:
            await one_turn(filled, calls, 0)
            filled.times.clear()
        for number in range(options.rounds):
            for filled, calls in opened if number % 2 == 0 else opened[::-1]:
                await one_turn(filled, calls, number)
        for number in range(_ROUNDS_AT_ONCE):
            for tenants in map(int, options.tenants.split(",")):
                for filled, calls in opened if number % 2 == 0 else opened[::-1]:
                    started = perf_counter()
                    done, polls = await at_once(calls, tenants, options.seconds)
                    filled.rates.setdefault(tenants, []).append(done / (perf_counter() - started))
                    filled.polls.setdefault(tenants, []).extend(polls)
        return await hot_statements(opened[-1][1])
    finally:
        for _, calls in opened:
            await calls.close()


def explained(filled: Filled, statements: Sequence[Sent]) -> tuple[list[str], int]:
    """Print every plan. Return the names of plans that read a table from end to end, and the most rows one reads in vain."""
    sequential, most = [], 0
    with psycopg.connect(server_url(make_url(filled.url)), autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        for sent in statements:
            plan = explain(connection, sent, generic=False)
            generic = explain(connection, sent, generic=True)
            print(f"\n{sent.name}")
            for line in plan:
                print(f"  {line[:_LONGEST_LINE]}")
            most = max(most, rows_in_vain(plan), rows_in_vain(generic))
            for kind, lines in (("", plan), (" (generic)", generic)):
                if is_sequential(lines):
                    sequential.append(sent.name + kind)
    return sequential, most


def percentile_95(values: Sequence[float]) -> float:
    """Return the 95th percentile of at least two values."""
    return statistics.quantiles(values, n=20)[-1]


def print_tables(small: Filled, large: Filled) -> None:
    """Print the table of calls, then the table of tenants working at once."""
    print(f"\n{'call':24}{'10k ms':>10}{'1m ms':>10}{'ratio':>8}")
    for name in small.times:
        before, after = small.median(name), large.median(name)
        print(f"{name:24}{before:10.2f}{after:10.2f}{after / before:8.2f}")
    print(f"\n{'tenants':8}{'rows':>10}{'ops/s':>10}{'poll p50 ms':>14}{'poll p95 ms':>14}")
    for tenants in small.rates:
        for filled in (small, large):
            polls = filled.polls[tenants]
            rate, p50, p95 = statistics.median(filled.rates[tenants]), statistics.median(polls), percentile_95(polls)
            print(f"{tenants:<8}{filled.made.rows:>10}{rate:10.0f}{p50:14.2f}{p95:14.2f}")


def figures(small: Filled, large: Filled) -> dict[str, object]:
    """Return the figures of the JSON line."""

    def by_tenants(values: dict[int, float]) -> dict[str, float]:
        return {str(tenants): round(value, 3) for tenants, value in values.items()}

    found: dict[str, object] = {
        "p50_ms_at_10k": round(small.median("life"), 3),
        "p50_ms_at_1m": round(large.median("life"), 3),
        "ratio": round(large.median("life") / small.median("life"), 3),
        "poll_p50_ms_at_10k": round(small.median("poll"), 3),
        "poll_p50_ms_at_1m": round(large.median("poll"), 3),
    }
    for size, filled in (("10k", small), ("1m", large)):
        found |= {
            f"calls_p50_ms_at_{size}": {name: round(filled.median(name), 3) for name in filled.times},
            "ops_per_s" if filled is large else f"ops_per_s_at_{size}": by_tenants(
                {n: statistics.median(rates) for n, rates in filled.rates.items()}
            ),
            f"polls_p50_ms_at_{size}": by_tenants({n: statistics.median(polls) for n, polls in filled.polls.items()}),
            f"polls_p95_ms_at_{size}": by_tenants({n: percentile_95(polls) for n, polls in filled.polls.items()}),
        }
    return found


def main() -> None:
    """Measure and print."""
    options = parse_options()
    server = make_url(options.database)
    tenants = max(map(int, options.tenants.split(",")))
    with ExitStack() as stack:
        small, large = (
            stack.enter_context(filled_database(server, rows, tenants)) for rows in (options.small, options.large)
        )
        statements = uvloop.run(measure([small, large], options))
        sequential, most = explained(large, statements)
        print_tables(small, large)
        print(
            json.dumps({**figures(small, large), "sequential_scans": sequential, "most_rows_in_vain": most}), flush=True
        )
