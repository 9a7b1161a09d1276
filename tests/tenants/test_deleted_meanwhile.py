"""Changes of a checkpoint that another process deletes at once: whoever comes second finds no checkpoint."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import func, select, text

from contracts.errors import NotFound
from contracts.paths import CheckpointPath, Segment
from tenants.checkpoint_changes import set_ttl
from tenants.checkpoints import delete_checkpoint
from tenants.sharing import set_public
from tests.tenants.test_checkpoint_retention import DEFAULTS, Saver
from tests.tenants.usage_books import NOON, Books

_WAITING = select(func.count()).select_from(text("pg_locks")).where(text("NOT granted AND locktype = 'transactionid'"))


def clock() -> Any:
    return NOON + timedelta(minutes=1)


@pytest_asyncio.fixture
async def cats(books: Books) -> AsyncIterator[Saver]:
    saver = Saver(books, 0)
    await saver.open()
    yield saver


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    "change", [partial(set_public, clock=clock, public=True), partial(set_ttl, clock=clock, ttl_seconds=60)]
)
async def test_a_change_of_a_checkpoint_that_is_deleted_meanwhile_finds_none(
    cats: Saver, change: Callable[..., Any]
) -> None:
    path = CheckpointPath(cats.run, Segment.WEIGHTS, await cats.save(DEFAULTS))
    kept = await cats.save(DEFAULTS)
    deleted = asyncio.Event()

    async def deleting() -> None:
        async with cats.books.database.write() as transaction:
            assert await delete_checkpoint(transaction, cats.tenant, path, clock)
            deleted.set()
            # Until the other one, which has found the row, waits for it.
            while not await transaction.scalar(_WAITING):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def changing() -> None:
        await deleted.wait()
        async with cats.books.database.write() as transaction:
            await change(transaction, cats.tenant, path)

    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(deleting(), changing(), return_exceptions=True)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], NotFound)
    assert set(await cats.kept()) == {kept}
