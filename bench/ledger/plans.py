"""PostgreSQL's plans of the statements that the ledger really sends."""

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from psycopg import Connection, sql
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from bench.ledger.calls import LedgerCalls

_BIG = r"(operations|operation_payloads|operation_results)"
_SEQUENTIAL = re.compile(rf"Seq Scan on {_BIG}\b")
_INDEX = re.compile(rf"Index (Only )?Scan (Backward )?using (?P<index>\w+) on {_BIG}\b")
_OF_THE_LEDGER = re.compile(rf"Scan .*\bon {_BIG}\b")
_IN_VAIN = re.compile(r"Rows Removed by (?:Filter|Index Recheck): (\d+)")
_TABLE = re.compile(r"\b(?:FROM|INTO|UPDATE) (\w+)")
PARTIAL_INDEXES = re.compile(r"ix_operations_(pending|unpruned|failed)\w*|ix_operation_payloads_kept")
"""Indexes that hold only the wanted rows, so that reading one from end to end reads no row in vain."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A statement that a call sent, in the database's own words, with its (first) parameters."""

    call: str
    text: str
    parameters: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Call, verb and table."""
        table = _TABLE.search(self.text)
        return f"{self.call}: {self.text.split()[0]} {table.group(1) if table else ''}".strip()


@contextmanager
def recorded(engine: AsyncEngine, call: str) -> Iterator[list[Sent]]:
    """Record the statements sent over ``engine`` inside the block, each text once."""
    sent: dict[str, Sent] = {}

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        sent.setdefault(statement, Sent(call, statement, tuple(parameters[0] if many else parameters)))

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    found: list[Sent] = []
    try:
        yield found
    finally:
        event.remove(engine.sync_engine, "before_cursor_execute", note)
        found += (one for one in sent.values() if not one.text.startswith("BEGIN"))


async def hot_statements(calls: LedgerCalls) -> list[Sent]:
    """Return every statement of every hot call. Accepts an operation of each tenant, and leaves the operations pending."""
    accepted: list[Any] = []
    tenant, run = calls.lanes[0]

    async def accept() -> None:
        accepted.append(await calls.accept(tenant, run))

    engine = calls.database.engine
    found: list[Sent] = []

    async def record(name: str, call: Callable[[], Awaitable[object]]) -> None:
        with recorded(engine, name) as sent:
            await call()
        found.extend(sent)

    await record("accept", accept)
    accepted += [await calls.accept(*lane) for lane in calls.lanes[1:]]
    await record("look", lambda: calls.look(calls.last_position))
    await record("load", lambda: calls.load(accepted[:1]))
    await record("load of all", lambda: calls.load(accepted))
    loaded = await calls.load(accepted)
    await record("complete", lambda: calls.complete_undone(loaded[:1]))
    await record("complete of all", lambda: calls.complete_undone(loaded))
    await record("poll", lambda: calls.poll(tenant, accepted[0]))
    for name, call in calls.others().items():
        await record(name, call)
    return found


def explain(connection: Connection, sent: Sent, *, generic: bool) -> list[str]:
    """Run the statement and return its plan's lines, with the real rows and times. Its writes are rolled back.

    ``generic``: return the plan that a prepared statement gets after a few runs, made without its parameters.
    """
    literals = sql.SQL(", ").join(map(sql.Literal, sent.parameters))
    execution = sql.SQL("EXECUTE hot({})").format(literals) if sent.parameters else sql.SQL("EXECUTE hot")
    mode = sql.Literal("force_generic_plan" if generic else "force_custom_plan")
    with connection.transaction(force_rollback=True):
        connection.execute(sql.SQL("SET LOCAL plan_cache_mode = {}").format(mode))
        connection.execute(f"PREPARE hot AS {sent.text}".encode())
        # An insert would find its own key taken.
        ran = (
            "COSTS off"
            if sent.text.startswith("INSERT")
            else "ANALYZE, BUFFERS off, COSTS off, TIMING off, SUMMARY off"
        )
        found = connection.execute(sql.SQL("EXPLAIN ({}) ").format(sql.SQL(ran)) + execution).fetchall()
        connection.execute("DEALLOCATE hot")
    return [str(row[0]) for row in found]


def is_sequential(plan: Sequence[str]) -> bool:
    """Return whether the plan reads one of the ledger's tables, or an index of one, from end to end."""
    for node in _nodes(plan):
        found = _INDEX.search(node[0])
        has_condition = any("Index Cond:" in line for line in node)
        if found and not has_condition and not PARTIAL_INDEXES.fullmatch(found["index"]):
            return True
        if _SEQUENTIAL.search(node[0]):
            return True
    return False


def rows_in_vain(plan: Sequence[str]) -> int:
    """Return the most rows of the ledger's tables that a node of the plan read at a time and threw away."""
    return max(
        (
            int(found.group(1))
            for node in _nodes(plan)
            if _OF_THE_LEDGER.search(node[0])
            for line in node
            if (found := _IN_VAIN.search(line))
        ),
        default=0,
    )


def _nodes(plan: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the lines of each node."""
    starts = [place for place, line in enumerate(plan) if "->" in line or place == 0]
    for start, end in pairwise([*starts, len(plan)]):
        yield plan[start:end]
