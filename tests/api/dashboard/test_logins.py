"""A browser has one web session: a login in it ends the one before; and a blocked tenant's people can log out."""

import asyncio

from sqlalchemy import select

from store.tables import AuditEntry
from tenants.login_codes import make_code
from tenants.rights import Role, SuspendMode
from tenants.suspensions import suspend_tenant
from tests.api.dashboard.test_run_feeds import step
from tests.api.dashboard.test_work_of_sessions import ADDRESS, _scope
from tests.api.dashboard.visits import cookie_of, key_of, log_in, visitor

SECONDS = 60
LOGOUT = 'action="/ui/logout"'


async def _entries(service, tenant) -> list[tuple[str, str]]:
    """Return the tenant's entries of the audit log."""
    async with service.database.read() as session:
        found = await session.scalars(
            select(AuditEntry).where(AuditEntry.tenant_id == tenant.id).order_by(AuditEntry.id)
        )
        return [(one.action, one.actor) for one in found]


async def test_a_login_ends_the_session_that_the_browser_has_and_no_other(service, cats, dogs) -> None:
    """The browser goes from one tenant's key to another's; elsewhere the first key's other session goes on."""
    key, theirs, run = await key_of(service, cats), await key_of(service, dogs), await cats.run()
    loop_time = service.services.admission.loop_time
    async with (
        asyncio.timeout(SECONDS),
        visitor(service, key.secret) as http,
        visitor(service, key.secret) as elsewhere,
        http.stream("GET", f"/ui/runs/{run}/events") as answer,
        elsewhere.stream("GET", f"/ui/runs/{run}/events") as going,
    ):
        lines, others = answer.aiter_lines(), going.aiter_lines()
        assert await anext(lines) == await anext(others) == "retry: 1000"
        began = await log_in(http, theirs.secret)
        assert began.status_code == 303
        assert loop_time.name_of(_scope(http.headers["cookie"])) == (f"address {ADDRESS}", True)
        assert loop_time.name_of(_scope(cookie_of(began))) == (f"tenant {dogs.id}", False)
        async for _ in lines:
            pass
        assert (await http.get("/ui")).status_code == 303
        assert (await http.get("/ui", headers={"cookie": cookie_of(began)})).status_code == 200
        assert (await elsewhere.get("/ui")).status_code == 200
        await step(cats, run, 1)
        while await anext(others) != "event: points":
            pass
        assert await _entries(service, cats) == [
            ("login_begin", key.prefix),
            ("login_begin", key.prefix),
            ("login_end", key.prefix),
        ]
        assert await _entries(service, dogs) == [("login_begin", theirs.prefix)]


async def test_a_code_ends_the_session_that_the_browser_has_and_a_refused_login_does_not(service, cats, dogs) -> None:
    theirs = await key_of(service, dogs)
    async with visitor(service, cats.key) as http:
        assert (await log_in(http, cats.key[:-1] + "~")).status_code == 401
        assert (await http.post("/ui/login/code", data={"code": "made up"})).status_code == 401
        assert (await http.get("/ui")).status_code == 200
        async with service.database.write() as transaction:
            code = await make_code(transaction, theirs.id, now=service.clock())
        began = await http.post("/ui/login/code", data={"code": code})
        assert (await http.get("/ui")).status_code == 303
        assert (await http.get("/ui", headers={"cookie": cookie_of(began)})).status_code == 200
    assert [action for action, _ in await _entries(service, cats)] == ["login_begin", "login_end"]
    assert [action for action, _ in await _entries(service, dogs)] == ["login_begin"]


async def test_a_blocked_tenants_people_can_log_out_and_do_nothing_else(service, cats, dogs) -> None:
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        async with service.database.write() as transaction:
            blocked = SuspendMode.BLOCKED
            await suspend_tenant(transaction, name="cats", reason="unpaid", now=service.clock(), mode=blocked)
        told = await http.get("/ui")
        assert (told.status_code, "this tenant is blocked: unpaid" in told.text) == (403, True)
        assert LOGOUT in told.text
        assert (await http.post("/ui/projects", data={"name": "whiskers"})).status_code == 403
        assert (await http.post("/ui/logout")).status_code == 303
        assert (await http.get("/ui")).status_code == 303
        assert (await log_in(http, cats.key)).status_code == 403
        assert (await other.get("/ui")).status_code == 200
    assert [action for action, _ in await _entries(service, cats)] == ["login_begin", "login_end"]


async def test_others_end_each_with_its_entry_and_a_member_ends_its_own_keys_alone(service, cats, dogs) -> None:
    member, manager = await key_of(service, cats, Role.MEMBER), await key_of(service, cats)
    async with (
        visitor(service, dogs.key) as stranger,
        visitor(service, manager.secret) as admin,
        visitor(service, member.secret) as second,
        visitor(service, member.secret) as http,
    ):
        forged = await http.post("/ui/sessions/others/end", data={}, headers={"sec-fetch-site": "cross-site"})
        assert forged.status_code == 403
        refused = await http.post("/ui/sessions/others/end", data={"whose": "tenant"})
        assert (refused.status_code, (await second.get("/ui")).status_code) == (403, 200)
        before = len(await _entries(service, cats))
        assert (await http.post("/ui/sessions/others/end", data={"whose": "key"})).status_code == 303
        assert [(await one.get("/ui")).status_code for one in (second, http, admin, stranger)] == [303, 200, 200, 200]
        assert (await _entries(service, cats))[before:] == [("login_end", member.prefix)]
        async with visitor(service, member.secret):
            assert (await admin.post("/ui/sessions/others/end", data={"whose": "tenant"})).status_code == 303
        assert [(await one.get("/ui")).status_code for one in (http, admin, stranger)] == [303, 200, 200]
        assert (await _entries(service, cats))[before + 2 :] == [("login_end", manager.prefix)] * 2
        # None is left: nothing is done, and nothing is told of.
        assert (await admin.post("/ui/sessions/others/end", data={"whose": "tenant"})).status_code == 303
        assert len(await _entries(service, cats)) == before + 4
        assert [one for one, _ in await _entries(service, dogs)] == ["login_begin"]
