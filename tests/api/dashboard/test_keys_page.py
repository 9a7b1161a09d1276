"""The page of keys: what it tells of a key fits together."""

import re
from datetime import timedelta

from sqlalchemy import update

from store.tables import ApiKey
from tests.api.dashboard.visits import key_of, visitor

_ROW = re.compile(r'<tr data-key="(\d+)">(.*?)</tr>', re.S)
_TIME = re.compile(r'<time datetime="([^"]+)"')


async def test_a_key_was_used_no_earlier_than_it_was_made(service, cats, dogs) -> None:
    """Uses are noted by their minute, which may have begun before the key."""
    service.clock.move(seconds=40)
    key, unused, bound = (
        await key_of(service, cats),
        await key_of(service, cats),
        await key_of(service, cats, max_rank=8),
    )
    minute = service.clock().replace(second=0)
    async with service.database.write() as transaction:
        for one, used in ((key, minute), (bound, minute + timedelta(minutes=3))):
            await transaction.execute(update(ApiKey).where(ApiKey.id == one.id).values(last_used_at=used))
    service.clock.move(minutes=5)
    manager, stranger = await key_of(service, cats), await key_of(service, dogs)
    async with visitor(service, manager.secret) as http, visitor(service, stranger.secret) as other:
        rows = {int(id): row for id, row in _ROW.findall((await http.get("/ui/keys")).text)}
        theirs = (await other.get("/ui/keys")).text
    made, used = _TIME.findall(rows[key.id])
    assert made == used
    assert len(_TIME.findall(rows[unused.id])) == 1
    assert "never" in rows[unused.id]
    made, used = _TIME.findall(rows[bound.id])
    assert made < used
    assert [">none<" in rows[one.id] for one in (key, bound)] == [True, False]
    assert key.prefix not in theirs
