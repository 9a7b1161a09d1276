"""A process that is killed while it rotates a key leaves one key, and a repeat of the request makes no third."""

import asyncio
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.tables import ApiKey
from tenants.key_text import hash_of
from tenants.keys import Repeatable, create_key, find_key, rotate_key
from tenants.signed_tokens import TokenSigner
from tenants.tenant_names import find_tenant
from tests.ledger.api_processes import Process

GRACE = timedelta(hours=1)


def repeatable(folder: Path) -> Repeatable:
    """The request that the killed process had, and that is sent again."""
    return Repeatable(TokenSigner(DataFolder(folder), utc_now), ("cats", "rotate", "once"))


async def rotate(database: Database, folder: Path, *, dies: str | None = None) -> str:
    """Rotate the first key of cats and return the new one's secret; the process dies ``before`` or ``after`` the commit."""
    async with database.write() as transaction:
        cats = await find_tenant(transaction, name="cats")
        first = (
            await transaction.scalars(select(ApiKey.id).where(ApiKey.tenant_id == cats).order_by(ApiKey.id))
        ).first()
        assert first is not None
        key = await find_key(transaction, cats, first)
        made = await rotate_key(transaction, key, grace=GRACE, clock=utc_now, repeatable=repeatable(folder))
        await transaction.flush()
        if dies == "before":
            os.kill(os.getpid(), signal.SIGKILL)
    if dies == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return made.secret


@pytest.mark.parametrize("dies", ["before", "after"])
async def test_a_killed_rotation_leaves_one_key_or_two_and_its_repeat_never_a_third(
    processes: list[Process], tmp_path: Path, dies: str
) -> None:
    database = processes[0].database
    async with database.write() as transaction:
        cats, dogs = [await find_tenant(transaction, name=name) for name in ("cats", "dogs")]
        old = await create_key(transaction, tenant=cats, note="", clock=utc_now)
        await create_key(transaction, tenant=dogs, note="", clock=utc_now)
    command = [sys.executable, "-m", "tests.ledger.test_killed_rotation", processes[0].url, str(tmp_path), dies]
    killed = await asyncio.create_subprocess_exec(*command)
    async with asyncio.timeout(120):
        assert await killed.wait() == -signal.SIGKILL

    async def live() -> list[ApiKey]:
        async with database.read() as session:
            return list(await session.scalars(select(ApiKey).where(ApiKey.tenant_id == cats).order_by(ApiKey.id)))

    left = await live()
    assert [key.id for key in left][:1] == [old.id]
    assert (len(left), left[0].expires_at is None) == ((1, True) if dies == "before" else (2, False))
    secrets = {await rotate(database, tmp_path) for _ in range(2)}
    after = await live()
    assert len(after) == 2
    assert {hash_of(secret) for secret in secrets} == {after[1].secret_hash}
    assert after[0].expires_at is not None
    async with database.read() as session:
        assert (await session.scalars(select(ApiKey.expires_at).where(ApiKey.tenant_id == dogs))).all() == [None]


if __name__ == "__main__":
    asyncio.run(rotate(Database(create_engine(sys.argv[1])), Path(sys.argv[2]), dies=sys.argv[3]))
