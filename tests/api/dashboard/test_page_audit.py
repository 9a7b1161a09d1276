"""Forms of a tenant's pages: each that changes something is in the audit log with who did it, or it is not done."""

from sqlalchemy import select

from store.tables import ApiKey, WebhookEvent, WebSession
from tenants.login_codes import make_code
from tests.api.audited_pages import TENANTS, TENANTS_UNAUDITED, entries, send_both_ways
from tests.api.dashboard.visits import key_of, routes, visitor
from tests.api.worlds import opened_world


def test_each_form_of_a_tenant_is_audited_or_says_why_not(service) -> None:
    found = [path for path, route in routes(service) if route.methods - {"GET", "HEAD"}]
    audited = [one.path for one in TENANTS]
    assert sorted(found) == sorted([*audited, *TENANTS_UNAUDITED])


async def test_each_form_of_a_tenant_makes_its_entries_with_its_key_or_changes_nothing(service, cats, dogs) -> None:
    """A second tenant, whose pages are open all the while, has no entry."""
    key, stranger = await key_of(service, cats), await key_of(service, dogs)
    async with (
        opened_world(service, cats, dogs) as world,
        visitor(service, stranger.secret) as theirs,
        visitor(service, key.secret),
        visitor(service, key.secret),
        visitor(service, key.secret) as http,
    ):
        logins = len(await entries(service))
        ids = {"run_id": world.own["run"], "segment": "weights", "name": "one", "key": key.secret}
        for change in TENANTS:
            if change.path == "/ui/webhooks":
                ids["name"] = "bell"
            async with service.database.write() as transaction:
                kind = WebSession.id if "/sessions/" in change.path else ApiKey.id
                of_whom = WebSession if "/sessions/" in change.path else ApiKey
                newest = select(kind).where(of_whom.tenant_id == cats.id).order_by(kind.desc()).limit(1)
                # The session that asks is the newest one: the one before it is another browser's.
                ids["number"] = str(await transaction.scalar(newest.offset(1) if kind is WebSession.id else newest))
                ids["event_id"] = await transaction.scalar(select(WebhookEvent.event_id).limit(1)) or ""
                ids["code"] = await make_code(transaction, key.id, now=service.clock())
            made = await send_both_ways(service, http, change, ids)
            assert tuple(one.action for one in made) == change.actions, change.path
            for one in made:
                who = (one.actor, one.key_id, one.role, one.door, one.tenant_id, one.address, one.outcome)
                assert who == (key.prefix, key.id, "admin", "ui", cats.id, "127.0.0.1", "done"), change.path
                assert (len(one.trace_id or ""), one.at) == (32, service.clock())
        assert (await theirs.get("/ui")).status_code == 200
        told = [one.action for one in await entries(service) if one.tenant_id == dogs.id]
        assert told == ["login_begin"]
        assert logins == 4
