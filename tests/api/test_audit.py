"""The audit log over HTTP: who is told of what, which routes make entries, and that none goes without."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi.routing import APIRoute, iter_route_contexts
from sqlalchemy import select, text, update
from weft_client import AsyncWeft

from store.settings import Settings
from store.tables import ApiKey, AuditEntry, Sampler
from tenants.audit import Actor, Door, record
from tenants.audit_actions import MEANINGS, Action
from tenants.keys import create_key
from tenants.rights import KeyRights, Role, SuspendMode
from tenants.suspensions import suspend_tenant
from tests.api.audited_routes import AUDITED, UNAUDITED
from tests.api.rights_matrix import CALLS, Call, filled
from tests.api.worlds import World, opened_world, send
from tests.conftest import ROOT

ADMIN = KeyRights(role=Role.ADMIN)
COOKBOOK = Path(sys.prefix) / "sdks" / "tinker-cookbook-0.6.1"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"poll_hold": timedelta(milliseconds=10)})


@pytest_asyncio.fixture
async def world(service, cats, dogs) -> AsyncIterator[World]:
    async with opened_world(service, cats, dogs) as made:
        yield made


async def entries(service) -> list[AuditEntry]:
    async with service.database.read() as session:
        return list(await session.scalars(select(AuditEntry).order_by(AuditEntry.id)))


def named(method: str, path: str) -> str:
    """Return method and path with ``*`` for every id, as the lists of routes have them."""
    path = path.replace("{checkpoint_id:path}", "{segment}/{name}").partition("?")[0]
    path = path.replace("/checkpoints/weights/one", "/checkpoints/*/*")
    path = path.replace("/webhooks/bell", "/webhooks/{name}")
    return f"{method} " + "/".join("*" if "{" in part else part for part in path.split("/"))


def test_each_route_that_changes_something_is_audited_or_says_why_not(service) -> None:
    found = set()
    for context in iter_route_contexts(service.app.routes):
        route = context.original_route if hasattr(context, "original_route") else context.route
        assert isinstance(route, APIRoute)
        if route.include_in_schema:
            found |= {named(method, context.path or "") for method in route.methods - {"GET", "HEAD"}}
    audited = {name for name in AUDITED if not name.startswith("GET ")}
    assert found == audited | UNAUDITED.keys()
    assert not AUDITED.keys() & UNAUDITED.keys()


async def test_each_change_makes_one_entry_and_nothing_else_makes_any(world: World) -> None:
    """A second tenant's rows are the same all the while, and it has no entry."""
    http = await world.client(ADMIN)
    async with world.service.database.write() as transaction:
        following = update(Sampler).where(Sampler.id == world.own["sampler"]).values(live_run_id=world.own["run"])
        await transaction.execute(following)
    seen = set()
    for call in CALLS:
        if call.is_followed:
            continue
        before = len(await entries(world.service))
        call = _told(call)
        answer = await send(http, call, world.own, 1)
        assert answer.status_code == call.status, (call, answer.text)
        made = (await entries(world.service))[before:]
        name = named(call.method, call.path)
        expected = AUDITED.get(name)
        if name == "POST /api/v1/load_weights" and call.body is not None and "session_id" in call.body:
            expected = Action.RUN_CREATE
        assert [one.action for one in made] == ([] if expected is None else [expected]), name
        for one in made:
            me = (one.door, one.role, one.address, len(one.trace_id or ""), one.outcome)
            assert me == ("key", "admin", "127.0.0.1", 32, "done")
            assert (one.tenant_id, one.key_id is not None, one.at) == (world.tenant.id, True, world.service.clock())
            assert one.actor.startswith("tml-")
        seen |= {name for _ in made}
    elsewhere = {"POST /api/weft/v1/imports", "DELETE /api/weft/v1/jobs/*", "POST /api/weft/v1/keys/*/rotate"}
    elsewhere |= {"DELETE /api/weft/v1/keys/*", "DELETE /api/v1/auth/apikey/me", "PUT /api/weft/v1/projects/*/limits"}
    elsewhere |= {"POST /api/weft/v1/webhooks/*/events/*/retry", "PUT /api/weft/v1/keys/*/limits"}
    assert seen >= AUDITED.keys() - elsewhere
    assert {one.tenant_id for one in await entries(world.service)} == {world.tenant.id}


def _told(call: Call) -> Call:
    """Return the call as this test sends it: the sampler is a live one here."""
    if call.path.endswith("/staleness") and call.method == "POST":
        body = {"max_version_lag": 2}
        return Call(call.method, call.path, call.needs, body)
    return call


async def test_keys_and_jobs_make_one_entry_each_and_repeats_none(world: World) -> None:
    http = await world.client(ADMIN)

    async def last(count: int) -> list[tuple[str, str]]:
        return [(one.action, one.resource_id) for one in (await entries(world.service))[-count:]]

    once = {"Idempotency-Key": "once"}
    for _ in range(2):
        made = (await http.post("/api/weft/v1/keys", json={"note": "n"}, headers=once)).raise_for_status().json()
    for _ in range(2):
        path = f"/api/weft/v1/keys/{made['key_id']}/rotate"
        rotated = (await http.post(path, json={}, headers=once)).raise_for_status().json()
    limits = {"limits": {"train_tokens_per_minute": 60}}
    (await http.put(f"/api/weft/v1/keys/{rotated['key_id']}/limits", json=limits)).raise_for_status()
    for _ in range(2):
        (await http.delete(f"/api/weft/v1/keys/{rotated['key_id']}")).raise_for_status()
    prefix, new = made["prefix"], rotated["prefix"]
    told = [("key_create", prefix), ("key_rotate", prefix), ("key_set", prefix), ("key_set", new), ("key_revoke", new)]
    assert await last(9) == told
    merge = filled(next(call.body for call in CALLS if call.path.endswith("/merges")), world.own)
    for _ in range(2):
        job = (await http.post("/api/weft/v1/merges", json=merge, headers=once)).raise_for_status().json()["id"]
    for _ in range(2):
        (await http.delete(f"/api/weft/v1/jobs/{job}")).raise_for_status()
    query, again = {"base_model": "test/tiny", "name": "theirs"}, {"Idempotency-Key": "again"}
    for _ in range(2):
        imported = await http.post("/api/weft/v1/imports", params=query, content=b"x" * 2000, headers=again)
        assert imported.status_code == 202, imported.text
    assert await last(3) == [("job_create", job), ("job_cancel", job), ("job_create", imported.json()["id"])]
    (await http.delete("/api/v1/auth/apikey/me")).raise_for_status()
    assert (await last(1))[0][0] == "key_revoke"


async def test_a_change_whose_entry_cannot_be_written_is_not_made(world: World) -> None:
    """Every audited route fails as a whole, and no table has a row more or less: the entry is in the change's transaction."""
    http = await world.client(ADMIN)
    (await http.put("/api/weft/v1/webhooks/bell", json={"url": "https://old.example/"})).raise_for_status()
    refuse = "CREATE TRIGGER refuse BEFORE INSERT ON audit_entries BEGIN SELECT RAISE(ABORT, 'no room'); END"
    async with world.service.database.write() as transaction:
        await transaction.execute(text(refuse))
        following = update(Sampler).where(Sampler.id == world.own["sampler"]).values(live_run_id=world.own["run"])
        await transaction.execute(following)
    before, rows = await world.counts(), await _contents(world)
    sent = 0
    for call in CALLS:
        is_creating = call.path.endswith("/load_weights") and call.body is not None and "session_id" in call.body
        if named(call.method, call.path) in AUDITED or is_creating:
            answer = await send(http, _told(call), world.own, 1)
            assert answer.status_code >= 500, (call, answer.text)
            sent += 1
    me = (await http.get("/api/v1/auth/apikey/me")).json()["key_id"]
    for method, path in (("POST", f"/api/weft/v1/keys/{me}/rotate"), ("DELETE", f"/api/weft/v1/keys/{me}")):
        assert (await http.request(method, path, json={})).status_code >= 500
    assert (await http.delete("/api/v1/auth/apikey/me")).status_code >= 500
    assert sent >= 16
    assert await world.counts() == before
    assert await _contents(world) == rows


async def _contents(world: World) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows that audited requests would change in place."""
    tables = {
        "api_keys": "id, revoked_at, expires_at",
        "sessions": "id, project, ended_at",
        "checkpoints": "id, expires_at",
        "samplers": "id, checkpoint_id, max_version_lag",
        "adapter_gates": "run_id, mode, generation",
    }
    async with world.service.database.read() as session:
        return {
            table: [tuple(row) for row in await session.execute(text(f"SELECT {columns} FROM {table} ORDER BY 1"))]
            for table, columns in tables.items()
        }


async def test_no_secret_of_a_test_is_in_the_table(world: World) -> None:
    """Keys, tokens, links, the path and query of a webhook, and what a user pastes into a note."""
    http = await world.client(ADMIN)
    paths = ["aTeN0fThEfIrStReCeIvEr" * 2, "sEcReToFtHeSeCoNdOnE09" * 2]
    for part in paths:
        body = {"url": f"https://bell.example/hooks/{part}?token={part}"}
        (await http.put("/api/weft/v1/webhooks/bell", json=body)).raise_for_status()
    entries = (await http.get("/api/weft/v1/audit?resource=webhook")).json()["entries"]
    assert [one["after"]["origin"] for one in entries] == ["https://bell.example"] * 2
    assert entries[0]["before"]["url_sha256"] == entries[1]["after"]["url_sha256"] != entries[0]["after"]["url_sha256"]
    (await http.delete("/api/weft/v1/webhooks/bell")).raise_for_status()
    pasted = "tml-abcdefabcdef-" + "q" * 50
    made = (await http.post("/api/weft/v1/keys", json={"note": f"was {pasted}"})).raise_for_status().json()
    rotated = (await http.post(f"/api/weft/v1/keys/{made['key_id']}/rotate", json={})).raise_for_status().json()
    token = (await http.post("/api/v1/auth/token")).raise_for_status().json()["jwt"]
    path = f"/api/v1/training_runs/{world.own['run']}/checkpoints/weights/one/archive"
    link = (await http.get(path, headers={"X-API-Key": token}, follow_redirects=False)).headers["location"]
    (await http.get(link, headers={"X-API-Key": ""})).raise_for_status()
    (await http.get(f"/api/v1/training_runs?x={pasted}", headers={"X-API-Key": pasted}))
    await world.service.services.audit_tally.write()
    async with world.service.database.read() as session:
        rows = (await session.execute(select(*AuditEntry.__table__.columns))).all()
        hashes = list(await session.scalars(select(ApiKey.secret_hash)))
    told = "\n".join(str(tuple(row)) for row in rows)
    secrets = [made["secret"], rotated["secret"], http.headers["x-api-key"], world.tenant.key, pasted, token]
    secrets += [link.split("/")[-2], *(found.hex() for found in hashes), *paths]
    assert [secret for secret in secrets if secret in told or secret[20:] in told] == []
    assert {one.door for one in rows} == {"key", "token", "link"}
    assert [one.resource_id for one in rows if one.door == "link"] == [f"tinker://{world.own['run']}/weights/one"]


async def test_a_tenant_reads_its_own_entries_and_of_operators_no_name(world: World) -> None:
    service, clock = world.service, world.service.clock
    http = await world.client(ADMIN)
    grace = Actor(Door.CLI, "grace@host-of-the-service", address="10.9.8.7")
    async with service.database.write() as transaction:
        await record(transaction, grace, Action.TENANT_SET, "cats", tenant=world.tenant.id, now=clock())
        await record(transaction, grace, Action.TENANT_SET, "dogs", tenant=_dogs(world), now=clock())
        await record(transaction, grace, Action.TRAINER_DRAIN, "trainer-1", tenant=None, now=clock())
    async with _client_of(world, _dogs(world)) as theirs:
        (await theirs.post("/api/weft/v1/projects", json={"name": "bones"})).raise_for_status()
        shown = (await theirs.get("/api/weft/v1/audit")).json()["entries"]
        assert [one["action"] for one in shown] == ["project_create", "tenant_set"]
    for path in ("/api/weft/v1/audit", "/api/weft/v1/audit?format=ndjson", "/api/v1/audit?day=2026-01-01"):
        told = (await http.get(path)).raise_for_status().text
        assert told.count("tenant_set") == 1, path
        assert not [word for word in ("grace", "host-of", "10.9.8.7", "dogs", "bones", "trainer-1") if word in told]
        assert '"operator"' in told
    for role in (Role.VIEWER, Role.MEMBER, Role.BILLING):
        refused = await world.client(KeyRights(role=role))
        for path in ("/api/weft/v1/audit", "/api/v1/audit"):
            assert (await refused.get(path)).status_code == 403


def _dogs(world: World) -> Any:
    return world.other_tenant["project"]


@asynccontextmanager
async def _client_of(world: World, tenant: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with world.service.database.write() as transaction:
        key = await create_key(transaction, tenant=tenant, note="", clock=world.service.clock, rights=ADMIN)
    async with httpx.AsyncClient(base_url=world.service.url, headers={"X-API-Key": key.secret}, timeout=40) as http:
        yield http


async def test_a_key_for_a_project_reads_of_that_project_alone(world: World) -> None:
    http = await world.client(ADMIN)
    for ids in (world.own, world.other_project):
        (await http.post(f"/api/v1/sessions/{ids['session']}/finish", json={})).raise_for_status()
    (await http.post("/api/weft/v1/projects", json={"name": "third"})).raise_for_status()
    bound = await world.client(KeyRights(role=Role.ADMIN, projects=frozenset({world.project})))
    shown = (await bound.get("/api/weft/v1/audit")).json()["entries"]
    told = [(one["action"], one["resource_id"], one["project_id"]) for one in shown]
    assert told == [("session_end", world.other_project["session"], world.project)]


async def test_entries_come_page_by_page_by_filter_and_as_lines(world: World) -> None:
    http = await world.client(ADMIN)
    for number in range(5):
        (await http.post("/api/weft/v1/projects", json={"name": f"p{number}"})).raise_for_status()
        world.service.clock.move(minutes=number % 2)
    key = (await http.post("/api/weft/v1/keys", json={})).raise_for_status().json()
    first = (await http.get("/api/weft/v1/audit?action=project_create&limit=2")).json()
    names = [one["after"]["name"] for one in first["entries"]]
    rest = f"/api/weft/v1/audit?action=project_create&limit=3&format=ndjson&cursor={first['next_cursor']}"
    lines = await http.get(rest)
    names += [json.loads(line)["after"]["name"] for line in lines.text.splitlines()]
    assert (names, "x-next-cursor" in lines.headers) == (["p4", "p3", "p2", "p1", "p0"], False)
    own = http.headers["x-api-key"][:16]
    queries = {
        f"key={own}&resource=key": 1,
        "key=tml-000000000000": 0,
        "resource=key&resource=project": 6,
        "since=2026-01-01T00:01:00Z&resource=project": 3,
        "until=2026-01-01T00:01:00Z&resource=project": 2,
    }
    for query, count in queries.items():
        found = (await http.get(f"/api/weft/v1/audit?{query}")).raise_for_status().json()["entries"]
        assert len(found) == count, query
    for wrong in ("1", "x-1", "1-x", "9" * 30 + "-1", "-"):
        refused = await http.get(f"/api/weft/v1/audit?cursor={wrong}")
        assert (refused.status_code, "next_cursor" in refused.text) == (400, True), wrong
    assert (await http.get("/api/weft/v1/audit?action=nothing")).status_code == 400
    async with AsyncWeft(world.service.url, http.headers["x-api-key"]) as weft:
        found = [one async for one in weft.audit.entries(action=["key_create"], since=datetime(2026, 1, 1, tzinfo=UTC))]
    assert [(one.resource_id, one.actor) for one in found] == [(key["prefix"], own)]


async def test_refusals_are_counted_by_key_and_minute(world: World) -> None:
    """A wrong secret, a missing scope and a suspended tenant; a flood of wrong keys makes a bounded number of entries."""
    service = world.service
    viewer = await world.client(KeyRights(role=Role.VIEWER))
    async with httpx.AsyncClient(base_url=f"{service.url}/api/v1", timeout=40) as stranger:
        guess = world.tenant.key[:17] + "x" * 43
        # Made-up keys first: they hide no attempt on a real one.
        for number in range(300):
            key = f"tml-{number:012x}-" + "y" * 43
            assert (await stranger.get("/training_runs", headers={"X-API-Key": key})).status_code == 401
        for _ in range(30):
            assert (await stranger.get("/training_runs", headers={"X-API-Key": guess})).status_code == 401
    for _ in range(20):
        assert (await viewer.post("/api/weft/v1/projects", json={"name": "x"})).status_code == 403
    async with service.database.write() as transaction:
        await suspend_tenant(transaction, name="dogs", reason="x", now=service.clock(), mode=SuspendMode.BLOCKED)
    async with _client_of(world, _dogs(world)) as blocked:
        for path in ("/api/v1/training_runs", "/v1/models"):
            assert (await blocked.get(path)).status_code == 403
    assert await entries(service) == []
    await service.services.audit_tally.write()
    found = {(one.actor, one.after["cause"]): one for one in await entries(service)}
    assert len(found) == 4
    claimed = found[world.tenant.key[:16], "unauthenticated"]
    assert (claimed.after["count"], claimed.tenant_id, claimed.key_id) == (30, world.tenant.id, None)
    unknown = found["unknown keys", "unauthenticated"]
    assert (unknown.after["count"], unknown.tenant_id) == (300, None)
    mine = found[viewer.headers["x-api-key"][:16], "forbidden"]
    assert (mine.after["count"], mine.resource_id, mine.role) == (20, "POST /api/weft/v1/projects", "viewer")
    (suspended,) = (one for (_, cause), one in found.items() if cause == "suspended")
    assert (suspended.after["count"], suspended.tenant_id) == (2, _dogs(world))
    assert {one.outcome for one in found.values()} == {"refused"}
    assert world.tenant.key not in str([one.after for one in found.values()])
    await service.services.audit_tally.write()
    assert len(await entries(service)) == 4


async def test_reads_of_usage_and_of_the_log_itself_are_counted(world: World) -> None:
    http = await world.client(ADMIN)
    for _ in range(3):
        (await http.get("/api/v1/billing/usage/checkpoints/current")).raise_for_status()
        (await http.get("/api/weft/v1/usage?since=2026-01-01T00:00:00Z")).raise_for_status()
        (await http.get("/api/weft/v1/audit")).raise_for_status()
    await world.service.services.audit_tally.write()
    shown = (await http.get("/api/weft/v1/audit")).json()["entries"]
    told = sorted((one["action"], one["after"]["count"], one["actor"]) for one in shown)
    own = http.headers["x-api-key"][:16]
    assert told == [("audit_read", 3, own), ("usage_read", 6, own)]


SDK_READ = """
import sys
from datetime import date
import tinker
from tests.e2e.sdk_end import end
client = tinker.AdminClient(base_url=sys.argv[1], api_key=sys.argv[2])
def seen(kind, day):
    return [(one.event, one.tinker_path) for one in client.get_audit_log(kind, day).result().entries]
day = date.fromisoformat(sys.argv[3])
kinds = ("all", "checkpoints", "projects", "teams", "organizations")
found = {kind: seen(kind, day) for kind in kinds}
first = client.get_audit_log("checkpoints", day).result().entries[0]
found["details"] = [first.model_id, first.purpose, first.event_details["actor"], first.timestamp.isoformat()]
found["today"] = seen("all", None)
found["before"] = seen("all", date(2025, 12, 31))
end(found)
"""


async def _run(*command: str, **environment: str) -> str:
    """Return what a command prints; fail unless it ends well."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TINKER_TELEMETRY": "0", **environment},
    )
    async with asyncio.timeout(120):
        output, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()[-3000:]
    return output.decode()


async def test_the_unmodified_sdk_reads_a_day(world: World) -> None:
    http = await world.client(ADMIN)
    run, path = world.own["run"], f"tinker://{world.own['run']}/weights/one"
    link = f"/api/v1/training_runs/{run}/checkpoints/weights/one/archive"
    assert (await http.get(link, follow_redirects=False)).status_code == 302
    world.service.clock.move(hours=1)
    (await http.delete(f"/api/v1/training_runs/{run}/checkpoints/weights/one")).raise_for_status()
    (await http.post("/api/weft/v1/projects", json={"name": "third"})).raise_for_status()
    (await http.post("/api/weft/v1/keys", json={})).raise_for_status()
    world.service.clock.move(hours=24)
    (await http.post("/api/weft/v1/projects", json={"name": "next day"})).raise_for_status()
    key = http.headers["x-api-key"]
    seen = json.loads(await _run(sys.executable, "-c", SDK_READ, world.service.url, key, "2026-01-01"))
    checkpoints = [["checkpoint_read", path], ["checkpoint_delete", path]]
    projects, keys = [["project_create", None]], [["key_create", None]]
    assert seen == {
        "all": [*checkpoints, *projects, *keys],
        "checkpoints": checkpoints,
        "projects": projects,
        "teams": [],
        "organizations": keys,
        "details": [run, "archive", key[:16], "2026-01-01T00:00:00+00:00"],
        "today": projects,
        "before": [],
    }


@pytest.mark.skipif(not COOKBOOK.is_dir(), reason="make sdks unpacks tinker-cookbook")
async def test_the_cookbooks_unmodified_script_saves_the_day(world: World, tmp_path: Path) -> None:
    """``save_audit_log --once``, as its page tells to run it."""
    world.service.clock.now = datetime.now(UTC)
    http = await world.client(ADMIN)
    link = f"/api/v1/training_runs/{world.own['run']}/checkpoints/weights/one/archive"
    assert (await http.get(link, follow_redirects=False)).status_code == 302
    await _run(
        sys.executable,
        "-m",
        "tinker_cookbook.scripts.save_audit_log",
        "--once",
        "--output-dir",
        str(tmp_path / "saved"),
        PYTHONPATH=str(COOKBOOK),
        TINKER_BASE_URL=world.service.url,
        TINKER_API_KEY=http.headers["x-api-key"],
    )
    lines = [json.loads(line) for file in (tmp_path / "saved").iterdir() for line in file.read_text().splitlines()]
    assert [(one["event"], one["tinker_path"], one["purpose"]) for one in lines] == [
        ("checkpoint_read", f"tinker://{world.own['run']}/weights/one", "archive")
    ]


def test_every_action_has_a_meaning() -> None:
    assert list(MEANINGS) == list(Action)


async def test_a_day_of_many_entries_is_answered_whole_and_in_order(world: World) -> None:
    http = await world.client(ADMIN)
    async with world.service.database.write() as transaction:
        actor = Actor(Door.KEY, "tml-000000000000")
        for number in range(1203):
            await record(
                transaction,
                actor,
                Action.PROJECT_CREATE,
                f"p-{number:05}",
                tenant=world.tenant.id,
                now=world.service.clock(),
            )
    answer = await http.get("/api/v1/audit", params={"event_type": "projects", "day": "2026-01-01"})
    found = [one["event_details"]["resource_id"] for one in answer.json()["entries"]]
    assert found[-1203:] == [f"p-{number:05}" for number in range(1203)]
    empty = await http.get("/api/v1/audit", params={"event_type": "teams", "day": "2026-01-01"})
    assert empty.json() == {"entries": []}
