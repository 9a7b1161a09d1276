"""The service after years of use: ``python -m bench.growth``.

Makes two throw-away databases on a PostgreSQL server, one with ten thousand sessions, samplers, checkpoints and operations,
one with a million of each, a tenth as many runs and gates, and as many events of runs. Times the calls of the ledger and of
``tenants`` on both in turns, and counts the pages that each call reads. Then lets housekeeping work the large one off, step
by step, and counts what is left. Prints tables and, last, one JSON line:

- ``sweep_max_s``: the longest run of a step, in seconds.
- ``ratio_max``: of the ledger's calls, the largest ratio of median times, large to small.
- ``tenants_ratio_max``: the same of the calls of ``tenants``.
- ``buffers``: pages that each call reads, small and large. Other work on the machine does not change them.
- ``rows_left``: rows that stay in each table once no step has anything left to do.

Nothing else should run meanwhile.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import uvloop
from sqlalchemy import URL, make_url

from bench.growth.buffers import BufferMeter
from bench.growth.calls import GrowthCalls
from bench.growth.filling import fill
from bench.growth.housekeeping import Grown, keep_house
from bench.growth.ledger_group import ledger_group
from bench.growth.tenants_group import tenants_group
from bench.ledger.benchmark import Filled, filled_database, time_lives
from bench.ledger.calls import LedgerCalls
from bench.ledger.rows import BASE_MODEL

T = TypeVar("T")

TENANTS = 64
PENDING = 64
"""Pending operations at every size: how many wait does not grow with the years."""
_METERED = 7
"""Runs of a call whose pages are counted."""


@dataclass
class Side:
    """A database of the two, its calls, and the pages that each call reads."""

    filled: Filled
    calls: GrowthCalls
    buffers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, filled: Filled) -> "Side":
        """Open connections to a filled database."""
        return cls(filled, GrowthCalls(filled.url, filled.made, ledger_group, tenants_group))

    async def turn(self, number: int) -> None:
        """Time a few lives of operations, and every other call once."""
        await time_lives(self.filled, self.calls.life, number)
        for timed in self.calls.all:
            started = perf_counter()
            await timed.call()
            self.filled.add(timed.name, (perf_counter() - started) * 1e3)

    async def count_buffers(self, server: URL) -> None:
        """Count the pages that each call reads."""
        with BufferMeter(server, self.filled.url) as meter:
            self.buffers |= await pages_of_life(meter, self.calls.life)
            for timed in self.calls.all:
                self.buffers[timed.name] = await meter.median(timed.database, timed.call, _METERED)


async def pages_of_life(meter: BufferMeter, life: LedgerCalls) -> dict[str, int]:
    """Return the pages that each part of an operation's life reads."""
    parts: dict[str, list[int]] = {}

    async def metered(name: str, work: Awaitable[T]) -> T:
        pages, outcome = await meter.pages(life.database, work)
        parts.setdefault(name, []).append(pages)
        return outcome

    for tenant, run in life.lanes[:_METERED]:
        request = await metered("accept", life.accept(tenant, run))
        await metered("poll", life.poll(tenant, request))
        await metered("look", life.look(life.last_position))
        loaded = await metered("load", life.load([request]))
        await metered("complete", life.complete(loaded))
        await metered("retrieve", life.retrieve(tenant, request))
    return {name: int(statistics.median(pages)) for name, pages in parts.items()}


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--database", default="postgresql+asyncpg://postgres@127.0.0.1:5432/postgres", help="a server's"
    )
    parser.add_argument("--small", type=int, default=10_000, help="rows of each table")
    parser.add_argument("--large", type=int, default=1_000_000, help="rows of each table")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each database, of five operations")
    parser.add_argument("--most-runs", type=int, default=2000, help="of each step of housekeeping; 0 leaves it out")
    return parser.parse_args()


async def time_calls(databases: Sequence[Filled], rounds: int, server: URL) -> list[Side]:
    """Time the calls on the databases, in turns, and count the pages that they read."""
    sides = [Side.of(filled) for filled in databases]
    try:
        for side in sides:
            await side.turn(0)
            side.filled.times.clear()
        for number in range(rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                await side.turn(number)
        for side in sides:
            await side.count_buffers(server)
    finally:
        for side in sides:
            await side.calls.close()
    return sides


def print_calls(small: Side, large: Side) -> None:
    """Print the table of calls."""
    print(f"\n{'call':26}{'small ms':>10}{'large ms':>10}{'ratio':>8}{'small pages':>14}{'large pages':>14}")
    for name in small.filled.times:
        before, after = small.filled.median(name), large.filled.median(name)
        pages = "".join(f"{side.buffers[name]:14,}" if name in side.buffers else " " * 14 for side in (small, large))
        print(f"{name:26}{before:10.2f}{after:10.2f}{after / before:8.2f}{pages}")


def print_housekeeping(grown: Grown) -> None:
    """Print the table of steps, then the table of rows."""
    print(f"\n{'step':24}{'runs':>8}{'rows':>12}{'seconds':>10}{'longest s':>12}")
    for step, kept in grown.steps.items():
        print(f"{step:24}{kept.runs:8}{kept.rows:12,}{kept.seconds:10.1f}{kept.longest:12.2f}")
    print(f"\n{'table':24}{'before':>12}{'after':>12}")
    for table, (before_rows, after_rows) in grown.rows.items():
        print(f"{table:24}{before_rows:12,}{after_rows:12,}")


def figures(small: Side, large: Side, grown: Grown) -> dict[str, object]:
    """Return the figures of the JSON line."""
    ratios = {name: large.filled.median(name) / small.filled.median(name) for name in small.filled.times}
    of_tenants = {timed.name for timed in small.calls.all if not timed.is_of_ledger}
    return {
        "sweep_max_s": round(max((kept.longest for kept in grown.steps.values()), default=0.0), 3),
        "ratio_max": round(max(ratio for name, ratio in ratios.items() if name not in of_tenants), 3),
        "tenants_ratio_max": round(max(ratios[name] for name in of_tenants), 3),
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "buffers": {name: [pages, large.buffers[name]] for name, pages in small.buffers.items()},
        "steps_max_s": {step.value: round(kept.longest, 3) for step, kept in grown.steps.items()},
        "rows_left": {table: after for table, (_, after) in grown.rows.items()},
    }


def main() -> None:
    """Measure and print."""
    options = parse_options()
    server = make_url(options.database)
    with ExitStack() as stack:
        databases = [
            stack.enter_context(filled_database(server, rows, TENANTS, pending=PENDING))
            for rows in (options.small, options.large)
        ]
        for filled in databases:
            fill(filled.url, filled.made.rows, tenants=TENANTS, base_model=BASE_MODEL)
        small, large = uvloop.run(time_calls(databases, options.rounds, server))
        print_calls(small, large)
        grown = Grown()
        if options.most_runs:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            grown = asyncio.run(keep_house(large.filled.url, options.most_runs, folder))
            print_housekeeping(grown)
        print(json.dumps(figures(small, large, grown)), flush=True)
