"""Finished samples: a page deep in the list begins at its place instead of at the newest."""

from datetime import timedelta
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.orm import Session

from tenants.finished_samples import list_samples
from tests.tenants.usage_books import NOON, Books

COUNT = 300


async def test_a_deep_page_begins_at_its_place_in_the_index(books: Books) -> None:
    for place in range(COUNT):
        await books.sampled(0, NOON + timedelta(seconds=place))
    await books.sampled(1, NOON)
    sent: list[tuple[str, Any]] = []
    event.listen(
        books.database.engine.sync_engine, "before_cursor_execute", lambda *given: sent.append((given[2], given[3]))
    )
    async with books.database.read() as session:
        page = await list_samples(session, books.tenants[0], most=10, after="operation-20")
    assert [one.id for one in page.samples] == [f"operation-{number}" for number in range(19, 9, -1)]
    (statement, parameters) = next(one for one in sent if "LIMIT" in one[0])
    is_sqlite = books.database.has_one_service

    def explained(session: Session) -> list[str]:
        if not is_sqlite:
            session.execute(text("SET LOCAL enable_seqscan = off"))
        told = session.connection().exec_driver_sql(
            f"EXPLAIN {'QUERY PLAN' if is_sqlite else ''} {statement}", parameters
        )
        return [str(row) for row in told]

    async with books.database.write() as transaction:
        plan = await transaction.run_sync(explained)
    bounds = [one for one in plan if "tenant_id=?" in one or "Index Cond" in one]
    assert any("finished_at" in one and "<" in one for one in bounds), plan
