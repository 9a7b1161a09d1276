"""Pages of webhooks: a secret is shown once, and each change is the API's own, in the audit log and with its rights."""

import re

from sqlalchemy import select

from store.tables import AuditEntry, Webhook, WebhookEvent
from tenants.rights import Role
from tests.api.dashboard.visits import key_of, visitor

URL = "https://bell.example/weft"
HOSTILE = "<img src=x onerror=alert(1)>\u202e"
_SECRET = re.compile(r"whsec_[A-Za-z0-9+/=]+")


async def _made(http, name: str = "bell", **fields: str) -> str:
    """Make a webhook by the form, and return the secret that the page shows."""
    answer = await http.post("/ui/webhooks", data={"name": name, "url": URL, **fields})
    assert answer.status_code == 200, answer.text
    (secret,) = _SECRET.findall(answer.text)
    return secret


async def _rows(service, tenant) -> list[Webhook]:
    async with service.database.read() as session:
        return list(await session.scalars(select(Webhook).where(Webhook.tenant_id == tenant.id)))


async def _actions(service, tenant) -> list[str]:
    async with service.database.read() as session:
        found = await session.execute(
            select(AuditEntry.action, AuditEntry.door)
            .where(AuditEntry.tenant_id == tenant.id, AuditEntry.resource == "webhook")
            .order_by(AuditEntry.id)
        )
        return [action for action, door in found if door == "ui"]


async def test_a_secret_is_shown_when_it_is_made_and_never_again(service, cats, dogs) -> None:
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as http, visitor(service, (await key_of(service, dogs)).secret) as other:
        first = await _made(http)
        assert first == (await _rows(service, cats))[0].secrets[0]["secret"]
        for path in ("/ui/webhooks", "/ui/webhooks/bell", "/ui/webhooks/bell/deliveries"):
            assert _SECRET.findall((await http.get(path)).text) == []
        (second,) = _SECRET.findall((await http.post("/ui/webhooks/bell/secret")).text)
        assert second != first
        assert [one["secret"] for one in (await _rows(service, cats))[0].secrets] == [second, first]
        assert (await other.post("/ui/webhooks/bell/secret")).status_code == 404
    assert await _actions(service, cats) == ["webhook_set", "webhook_read", "webhook_rotate"]


async def test_a_form_that_is_sent_twice_changes_no_webhook_that_is_there(service, cats) -> None:
    async with visitor(service, (await key_of(service, cats)).secret) as http:
        secret = await _made(http, note="ours")
        again = await http.post("/ui/webhooks", data={"name": "bell", "url": "https://other.example/"})
        assert (again.status_code, "is named &#39;bell&#39; already" in again.text) == (400, True)
        assert 'value="https://other.example/"' in again.text
        (row,) = await _rows(service, cats)
        assert (row.url, row.note, row.secrets[0]["secret"]) == (URL, "ours", secret)
        loopback = await http.post("/ui/webhooks", data={"name": "in", "url": "https://127.0.0.1/"})
        assert (loopback.status_code, len(await _rows(service, cats))) == (400, 1)


async def test_a_webhook_is_changed_switched_tested_and_deleted_as_by_the_api(service, cats, dogs) -> None:
    async with visitor(service, (await key_of(service, cats)).secret) as http:
        await _made(http, **{"event:budget.alert": "1", "event:session.lost": "1"})
        async with visitor(service, (await key_of(service, dogs)).secret) as other:
            await _made(other)
        assert (await _rows(service, cats))[0].events == ["budget.alert", "session.lost"]
        assert (await http.post("/ui/webhooks/bell/disable")).status_code == 303
        changed = {"url": "https://new.example/", "note": HOSTILE}
        assert (await http.post("/ui/webhooks/bell", data=changed)).status_code == 303
        (row,) = await _rows(service, cats)
        assert (row.url, row.events, row.disabled_at is not None) == ("https://new.example/", ["*"], True)
        assert (await http.post("/ui/webhooks/bell/enable")).status_code == 303
        assert (await http.post("/ui/webhooks/bell/test")).status_code == 303
        page = (await http.get("/ui/webhooks/bell")).text
        assert 'data-event="webhook.test"' in page
        assert HOSTILE not in page + (await http.get("/ui/webhooks")).text
        assert (await http.post("/ui/webhooks/bell/delete")).status_code == 303
        assert await _rows(service, cats) == []
        assert len(await _rows(service, dogs)) == 1
        for path in ("test", "delete", "enable", "disable", "secret"):
            assert (await http.post(f"/ui/webhooks/bell/{path}")).status_code == 404, path
        assert (await http.post("/ui/webhooks/bell", data=changed)).status_code == 404
    set_twice = ["webhook_set", "webhook_set", "webhook_set"]
    assert await _actions(service, cats) == [
        "webhook_set",
        "webhook_read",
        *set_twice,
        "webhook_test",
        "webhook_delete",
    ]


async def test_a_key_without_the_scope_or_of_some_projects_has_no_webhooks(service, cats) -> None:
    async with visitor(service, (await key_of(service, cats)).secret) as http:
        await _made(http)
    bounded = await key_of(service, cats, Role.ADMIN, projects=[cats.id])
    for key in (await key_of(service, cats, Role.MEMBER), bounded):
        async with visitor(service, key.secret) as http:
            assert "/ui/webhooks" not in (await http.get("/ui")).text
            for method, path in (("GET", ""), ("GET", "/bell"), ("POST", "/bell/test"), ("POST", "/bell/delete")):
                assert (await http.request(method, f"/ui/webhooks{path}")).status_code == 403, path
    assert [one.disabled_at for one in await _rows(service, cats)] == [None]


async def _attempted(service, tenant, name: str, *, error: str | None) -> None:
    """Record an event of the tenant's webhook whose delivery went so."""
    (row,) = await _rows(service, tenant)
    now = service.clock()
    async with service.database.write() as transaction:
        taken = {"delivered_at": now if error is None else None, "last_error": error, "attempts": 1, "due_at": None}
        new = WebhookEvent(webhook_id=row.id, event_id=name, type="webhook.test", body="{}", created_at=now, **taken)
        transaction.add(new)


async def test_a_webhook_tells_why_its_newest_delivery_failed_until_one_is_taken(service, cats, dogs) -> None:
    mine, theirs = (await key_of(service, cats)).secret, (await key_of(service, dogs)).secret
    async with visitor(service, mine) as http, visitor(service, theirs) as other:
        await _made(http)
        await _made(other)
        await _attempted(service, cats, "first", error=HOSTILE)
        shown, beside = (await http.get("/ui/webhooks")).text, (await other.get("/ui/webhooks")).text
        assert "failed: &lt;img src=x" in shown
        assert "on, failing" in (await http.get("/ui/webhooks/bell")).text
        assert "failing" not in beside
        assert "failed: " not in beside
        await _attempted(service, cats, "second", error=None)
        assert "failing" not in (await http.get("/ui/webhooks")).text
