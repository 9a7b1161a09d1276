"""Operators' pages over a service with everything in it: each is shown whole, and names what is there."""

from datetime import timedelta

import httpx
from sqlalchemy import update

from store.clock import utc_now
from store.tables import Run, WorkerProcess
from tenants.run_history import RunEventKind, note_run_events
from tests.api.admin.conftest import Admin
from tests.api.conftest import BASE, Tenant

OWN = {"Sec-Fetch-Site": "same-origin"}


async def test_every_page_shows_what_is_there(admin: Admin, cats: Tenant, dogs: Tenant) -> None:
    run = await cats.run()
    for seq_id in (1, 2, 3):
        await cats.operation(run, seq_id)
    await dogs.operation(await dogs.run())
    (await admin.http.put(f"/tenants/{cats.id}/suspension", json={"reason": "unpaid"})).raise_for_status()
    asked = {"base_model": BASE, "directive": "drain", "reason": "new driver"}
    (await admin.http.put("/replicas/spare-0", json=asked)).raise_for_status()
    now = utc_now()
    async with admin.service.database.write() as transaction:
        for kind, ends in (("trainer", now + timedelta(hours=1)), ("pool", now - timedelta(hours=1))):
            place = {"base_model": BASE, "host": "here", "pid": 7, "started_at": now, "expires_at": ends}
            transaction.add(WorkerProcess(id=f"{kind}-1", kind=kind, **place, resident_runs=[run]))
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
            ("replicas", ("spare-0", "new driver", "draining")),
            ("processes", ("trainer-1", "pool-1", "dead", "In memory", "Replays")),
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
        for path in ("tenants/nobody", "runs/nothing", "nowhere"):
            assert (await http.get(f"/ops/{path}")).status_code == 404
