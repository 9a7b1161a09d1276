"""Forms of a tenant's pages: each that changes something is in the audit log with who did it, or it is not done."""

from sqlalchemy import select

from store.tables import ApiKey, WebhookEvent, WebSession
from tenants.login_codes import make_code
from tenants.looks import begin_look
from tests.api.audited_pages import TENANTS, TENANTS_UNAUDITED, entries, send_both_ways
from tests.api.dashboard.visits import cookie_of, key_of, log_in, routes, visitor
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


async def test_logins_and_looks_that_are_refused_are_counted(service, cats, dogs) -> None:
    """Wrong codes, a key from another network, and a look that would change something; a second tenant has no entry."""
    bound = await key_of(service, cats, networks=("10.0.0.0/8",))
    async with service.database.write() as transaction:
        look = await begin_look(transaction, cats.id, operator="grace", reason="ticket 7", clock=service.clock)
        code = await make_code(transaction, bound.id, now=service.clock())
    async with visitor(service) as http:
        for _ in range(2):
            assert (await http.post("/ui/login/code", data={"code": "guess"})).status_code == 401
        assert (await log_in(http, bound.secret)).status_code == 403
        assert (await http.post("/ui/login/code", data={"code": code})).status_code == 403
        begun = await http.post("/ui/login/code", data={"code": look})
        assert begun.status_code == 303
        refused = await http.post("/ui/projects", data={"name": "x"}, headers={"cookie": cookie_of(begun)})
        assert refused.status_code == 403
    await service.services.audit_tally.write()
    found = [one for one in await entries(service) if one.action == "request_refuse"]
    told = {(one.actor, one.tenant_id, one.after["cause"]): one.after["count"] for one in found}
    looking = next(actor for actor, tenant, _ in told if tenant == cats.id and actor != bound.prefix)
    assert told == {
        ("unknown keys", None, "unauthenticated"): 2,
        (bound.prefix, cats.id, "forbidden"): 2,
        (looking, cats.id, "forbidden"): 1,
    }
    assert [one for one in await entries(service) if one.tenant_id == dogs.id] == []
