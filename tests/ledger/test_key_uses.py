"""A key's last use is written once a minute, by whichever of several processes comes first."""

import asyncio
from datetime import timedelta
from typing import Any

from sqlalchemy import event, select

from store.clock import utc_now
from store.tables import ApiKey
from tenants.key_uses import KeyUses
from tenants.keys import create_key
from tests.ledger.api_processes import Process, tenant

REQUESTS, WRITES = 1000, 10


async def test_a_thousand_requests_of_a_minute_to_three_processes_change_the_keys_row_once(
    processes: list[Process],
) -> None:
    """Each process is told of an unused key: it has not read what the others have written."""
    async with processes[0].database.write() as transaction:
        used, idle = [
            await create_key(transaction, tenant=await tenant(processes, name), note="", clock=utc_now)
            for name in ("cats", "dogs")
        ]
    changed: list[int] = []

    def note(_connection: Any, cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("UPDATE api_keys"):
            changed.append(cursor.rowcount)

    for one in processes:
        event.listen(one.database.engine.sync_engine, "after_cursor_execute", note)
    uses = [KeyUses(one.database) for one in processes]
    minute = utc_now().replace(second=0, microsecond=0)

    for later in range(2):
        now = minute + timedelta(minutes=later, seconds=7)
        for _ in range(WRITES):
            for number in range(REQUESTS // WRITES):
                uses[number % len(uses)].note(used.id, None, now)
            await asyncio.gather(*(one.write() for one in uses))
        assert sum(changed) == 1 + later
        assert len(changed) <= (1 + later) * len(uses), "a statement for each write"
    async with processes[0].database.read() as session:
        rows = {row.id: row.last_used_at for row in await session.execute(select(ApiKey.id, ApiKey.last_used_at))}
    assert (rows[used.id], rows[idle.id]) == (minute + timedelta(minutes=1), None)
