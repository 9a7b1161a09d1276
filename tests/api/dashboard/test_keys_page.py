"""The page of keys: what it tells of a key fits together."""

import re
from datetime import timedelta

import pytest
from sqlalchemy import select, update

from store.tables import ApiKey
from tests.api.dashboard.visits import key_of, visitor

_ROW = re.compile(r'<tr data-key="(\d+)">(.*?)</tr>', re.S)
_TIME = re.compile(r'<time datetime="([^"]+)"')
_HIDDEN = re.compile(r'<input type="hidden" name="(\w+)" value="([^"]+)">')
_SECRET = re.compile(r'<pre id="secret"[^>]*>([^<]+)<')


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


async def test_a_form_that_is_sent_twice_shows_the_secret_of_a_key_that_ends(service, cats, dogs) -> None:
    mine, theirs = await key_of(service, cats), await key_of(service, dogs)
    async with visitor(service, mine.secret) as http, visitor(service, theirs.secret) as other:
        hidden = dict(_HIDDEN.findall((await http.get("/ui/keys")).text))
        fields = hidden | {"note": "x", "role": "viewer", "days": "30"}
        # A page that was left open: the key ends as many days later as it says.
        service.clock.move(hours=2, seconds=7)
        sent = service.clock()
        secrets = []
        for client in (http, http, other):
            answer = await client.post("/ui/keys", data=fields)
            assert answer.status_code == 200, answer.text
            secrets += _SECRET.findall(answer.text)
            service.clock.move(seconds=1)
    assert (len(secrets), secrets[0]) == (3, secrets[1])
    assert secrets[2] != secrets[0]
    async with service.database.read() as session:
        made = list(await session.scalars(select(ApiKey).where(ApiKey.note == "x").order_by(ApiKey.id)))
    assert [one.tenant_id for one in made] == [cats.id, dogs.id]
    assert all(timedelta(hours=-1) < one.expires_at - sent - timedelta(days=30) <= timedelta() for one in made)


@pytest.mark.parametrize("shown", [None, "99999999999999999", "-99999999999999999"])
async def test_a_form_that_tells_no_time_of_its_own_makes_a_key_that_ends_as_it_says(service, cats, shown) -> None:
    key, sent = await key_of(service, cats), service.clock()
    fields = {"note": "x", "days": "1"} | ({} if shown is None else {"shown": shown})
    async with visitor(service, key.secret) as http:
        assert (await http.post("/ui/keys", data=fields)).status_code == 200
    async with service.database.read() as session:
        made = (await session.scalars(select(ApiKey).where(ApiKey.note == "x"))).one()
    assert timedelta(hours=-1) < made.expires_at - sent - timedelta(days=1) <= timedelta()
