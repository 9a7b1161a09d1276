"""Operators' pages over a service with everything in it: each is shown whole, and names what is there."""

import re
from datetime import timedelta
from html import unescape

import httpx
import pytest
from sqlalchemy import update

from store.clock import utc_now
from store.tables import Run, WorkerProcess
from tenants.ended_processes import note_ended
from tenants.run_history import RunEventKind, note_run_events
from tests.api.admin.conftest import Admin
from tests.api.conftest import BASE, Tenant

OWN = {"Sec-Fetch-Site": "same-origin"}
_VERSION = re.compile(r'name="version" value="([^"]*)"')
_NAMED = re.compile(r'<input id="replica"[^>]* value="([^"]*)"')


async def test_every_page_shows_what_is_there(admin: Admin, cats: Tenant, dogs: Tenant) -> None:
    run, other = await cats.run(), await dogs.run()
    for seq_id in (1, 2, 3):
        await cats.operation(run, seq_id)
    await dogs.operation(other)
    (await admin.http.put(f"/tenants/{cats.id}/suspension", json={"reason": "unpaid"})).raise_for_status()
    asked = {"base_model": BASE, "directive": "drain", "reason": "new driver"}
    (await admin.http.put("/replicas/spare-0", json=asked)).raise_for_status()
    # No process has told of it, so nobody knows that it sleeps.
    asked = {"base_model": BASE, "directive": "sleep", "reason": "night"}
    (await admin.http.put("/replicas/spare-1", json=asked)).raise_for_status()
    now = utc_now()
    async with admin.service.database.write() as transaction:
        alive, over = now + timedelta(hours=1), now - timedelta(hours=1)
        for name, ends in (("trainer-1", alive), ("pool-1", over), ("api-1", alive), ("trainer-2", over)):
            place = {"base_model": BASE, "host": "here", "pid": 7, "started_at": now, "expires_at": ends}
            replicas = [{"name": "vllm-0", "condition": "down", "adapters": 3}] if name == "pool-1" else None
            kind = name.partition("-")[0]
            transaction.add(WorkerProcess(id=name, kind=kind, **place, resident_runs=[run], replicas=replicas))
            await transaction.flush()
        await note_run_events(transaction, [run], RunEventKind.LOST, trainer="trainer-2", now=now)
        await note_ended(transaction, ["trainer-2"], now=now, runs=1)
        await transaction.execute(update(Run).where(Run.id == run).values(trainer_id="trainer-1"))
        await note_run_events(transaction, [run], RunEventKind.REPLAYED, trainer="trainer-1", now=admin.service.clock())
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        begun = await http.post("/ops/login", data={"key": admin.key.secret}, headers=OWN)
        http.headers["Cookie"] = begun.headers["set-cookie"].partition(";")[0]
        for path, words in (
            ("overview", ("cats", "dogs", "trainer-1", "spare-0")),
            ("tenants", ("cats", "dogs", "hold")),
            (f"tenants/{cats.id}", ("unpaid", run)),
            ("queue", ("cats", "dogs", "held", "unpaid")),
            ("replicas", ("spare-0", "new driver", "draining", "falling asleep", "vllm-0", "dead")),
            (
                "processes",
                ("trainer-1", "pool-1", "api-1", "dead", "In memory", "Replays", "trainer-2", "1 run now with"),
            ),
            ("runs", (run, "in memory")),
            (f"runs/{run}", ("cats", "3 operations", "in memory")),
            ("sessions", (run.partition(":")[0],)),
            ("audit", ("tenant suspend", "replica direct", "login begin")),
            ("housekeeping", ("expire-links",)),
        ):
            page = await http.get(f"/ops/{path}")
            assert page.status_code == 200, (path, page.text[-500:])
            assert [word for word in words if word not in page.text] == [], path
            if path in ("overview", "tenants", "queue", "replicas", "processes"):
                part = await http.get(f"/ops/{path}/now")
                assert (part.status_code, "<!doctype" in part.text) == (200, False)
        # Of several none is named: the first base model may be none of the first replica's.
        assert _NAMED.findall((await http.get("/ops/replicas")).text) == [""]
        # A tenant is found by its name, too.
        for asked in ("cats", cats.id):
            found = (await http.get("/ops/runs", params={"tenant_id": asked})).text
            assert (run in found, other in found, ">cats</a>" in found) == (True, False, True)
            found = (await http.get("/ops/audit", params={"tenant": asked, "action": "tenant_suspend"})).text
            assert "unpaid" in found
        for noun in ("run", "session"):
            assert f"No {noun} is like that" in (await http.get(f"/ops/{noun}s?tenant_id=nobody")).text
        for path in ("tenants/nobody", "runs/nothing", "nowhere"):
            assert (await http.get(f"/ops/{path}")).status_code == 404


async def test_a_new_service_says_when_its_lists_fill(admin: Admin) -> None:
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        begun = await http.post("/ops/login", data={"key": admin.key.secret}, headers=OWN)
        http.headers["Cookie"] = begun.headers["set-cookie"].partition(";")[0]
        for noun in ("run", "session"):
            page = (await http.get(f"/ops/{noun}s")).text
            assert (f"No {noun} yet" in page, "is like that" in page) == (True, False)


@pytest.mark.parametrize("share", ["nan", "inf", "-inf", "1e400"])
async def test_a_share_that_is_no_finite_number_is_refused_and_not_passed_over(
    admin: Admin, cats: Tenant, dogs: Tenant, share: str
) -> None:
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        begun = await http.post("/ops/login", data={"key": admin.key.secret}, headers=OWN)
        http.headers["Cookie"] = begun.headers["set-cookie"].partition(";")[0]
        page = f"/ops/tenants/{cats.id}"
        form = {"version": unescape(_VERSION.findall((await http.get(page)).text)[0]), "share": share}
        refused = await http.post(f"{page}/settings", data=form, headers=OWN)
        assert "share must be a number" in refused.text
        changed = await http.post(f"{page}/settings", data={**form, "share": " 2.5 "}, headers=OWN)
        assert changed.status_code == 303
    shares = {row["id"]: row["share"] for row in (await admin.http.get("/tenants")).json()["items"]}
    assert (shares[cats.id], shares[dogs.id]) == (2.5, 1.0)
