"""Long lists are read and encoded in many short steps: others have their turns between two of them."""

import asyncio
from datetime import timedelta
from time import process_time
from typing import Any

import httpx
from sqlalchemy import event, insert

from api.paging import MAX_LIMIT
from api.route_building import build_routes
from api.weft.audit import MOST_ENTRIES
from api.weft.sample_list import MOST_SAMPLES
from api.weft.usage import MOST_LINES
from contracts.ids import RequestId, SessionId
from contracts.ledger_records import OperationState
from contracts.paths import Segment
from contracts.sample_report import SampleReport, SequenceReport, VersionSpan
from store.tables import ApiKey, AuditEntry, Checkpoint, Operation, Project, Run, RunState, Sampler, UsageHour
from tenants.audit import bounded
from tenants.keys import MOST_KEYS
from tenants.metered_operations import SUMS
from tenants.project_limits import PROJECT_LIMITS
from tenants.projects import MOST_PROJECTS
from tenants.runs import run_id_for
from tenants.sample_reports import record_reports
from tenants.samplers import NewSampler, create_sampler
from tests.api.conftest import BASE, Tenant, as_administrator
from tests.api.dashboard.visits import key_of, visitor
from tests.api.stalls import no_stall

SAMPLERS, CHECKPOINTS = 65_536, 20_000
"""Most of one session, and of one tenant, by default."""
ENTRIES = 900
"""Most entries of 17 bytes that metadata has room for."""
SEQUENCES = 1024
"""Most of one sample, by default."""
PARTS = 2
"""Work for a long answer is cut into steps of which the longest takes no more than such a part of all, on a busy machine, too."""


async def in_short_steps(asked: Tenant, path: str, beside: Tenant, parts: int = PARTS) -> dict[str, Any]:
    """Return the body of what ``answered_in_short_steps`` returns."""
    answer = await answered_in_short_steps(asked.http, path, beside, parts)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


async def answered_in_short_steps(
    asked: httpx.AsyncClient, path: str, beside: Tenant, parts: int = PARTS
) -> httpx.Response:
    """Return the answer. Fail if one step took a large part of all, or a neighbour was not answered meanwhile."""
    build_routes(beside.service.app.router)
    session, beats = await beside.session(), 0

    async def beat() -> None:
        nonlocal beats
        while True:
            body = {"session_id": session}
            assert (await beside.http.post("/session_heartbeat", json=body)).status_code == 200
            beats += 1

    beating = asyncio.create_task(beat())
    async with no_stall() as stall:
        began, before = process_time(), beats
        answer = await asked.get(path)
        used, meanwhile = process_time() - began, beats - before
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    assert stall.longest_step < used / parts
    assert meanwhile > 1
    return answer


async def test_the_most_samplers_of_a_session(cats: Tenant, dogs: Tenant) -> None:
    session = await cats.session()
    run = await cats.run(session=session)
    rows = [
        {
            "id": f"{session}:sample:{number}",
            "tenant_id": cats.id,
            "session_id": session,
            "sampling_session_seq_id": number,
            "base_model": BASE,
            "created_at": cats.service.clock(),
        }
        for number in range(SAMPLERS)
    ]
    async with cats.service.database.write() as transaction:
        await transaction.execute(insert(Sampler), rows)
    shown = await in_short_steps(cats, f"/sessions/{session}", dogs)
    assert (shown["sampler_ids"], shown["training_run_ids"]) == ([row["id"] for row in rows], [run])
    assert (await dogs.http.get(f"/sessions/{session}")).status_code == 404


async def test_the_most_checkpoints_of_a_run(cats: Tenant, dogs: Tenant) -> None:
    """Newest first. Several are as old as each other, also where a page ends."""
    run, now = await cats.run(), cats.service.clock()
    rows = [
        {
            "id": f"{number:032x}",
            "tenant_id": cats.id,
            "run_id": run,
            "segment": Segment.WEIGHTS,
            "name": f"step-{number}",
            "directory": f"checkpoints/{number:032x}",
            "size_bytes": 1,
            "listed": True,
            "public": False,
            "created_at": now - timedelta(seconds=number // 3),
        }
        for number in range(CHECKPOINTS)
    ]
    async with cats.service.database.write() as transaction:
        await transaction.execute(insert(Checkpoint), rows)
    shown = await in_short_steps(cats, f"/training_runs/{run}/checkpoints", dogs)
    assert [one["checkpoint_id"] for one in shown["checkpoints"]] == [f"weights/{row['name']}" for row in rows]
    page = (await cats.http.get("/checkpoints?limit=2")).json()["checkpoints"]
    assert shown["checkpoints"][:2] == page
    assert shown["cursor"] is None
    assert (await dogs.http.get(f"/training_runs/{run}/checkpoints")).status_code == 404


async def test_the_most_samples_of_a_page_with_the_most_sequences(cats: Tenant, dogs: Tenant) -> None:
    """A report is decoded with every sequence and span, and others have their turns between two reports."""
    service, now, session = cats.service, cats.service.clock(), SessionId(await cats.session())
    spans = [VersionSpan(f"v{place}", place, place + 1) for place in range(4)]
    report = SampleReport([SequenceReport("length", spans)] * SEQUENCES, ["one"], 1, 0.5, 1.5)
    named = {"tenant_id": cats.id, "kind": "sample", "base_model": BASE, "state": OperationState.DONE}
    times = {"body_digest": b"", "created_at": now, "finished_at": now}
    async with service.database.write() as transaction:
        sampler = await create_sampler(transaction, cats.id, NewSampler(session, 0, BASE), service.clock)
        rows = [{"id": f"{number:032x}", "lane": sampler, "seq_id": number} for number in range(MOST_SAMPLES)]
        await transaction.execute(insert(Operation), [row | named | times for row in rows])
        await record_reports(transaction, [(cats.id, RequestId(row["id"]), report) for row in rows])
    shown = await in_short_steps(cats, f"{service.url}/api/weft/v1/samples?limit={MOST_SAMPLES}", dogs)
    assert [one["request_id"] for one in shown["samples"]] == [row["id"] for row in reversed(rows)]
    assert {len(one["stop_reasons"]) for one in shown["samples"]} == {SEQUENCES}
    assert (await dogs.http.get(f"{service.url}/api/weft/v1/samples")).json()["samples"] == []


async def test_the_most_entries_of_the_audit_log_as_large_as_they_may_be(cats: Tenant, dogs: Tenant) -> None:
    """Both forms of weft's own, and the day as the SDK reads it. Another tenant reads none of them."""
    service = cats.service
    values = bounded({f"value-{number}": "x" * 200 for number in range(50)})
    entry = {
        "actor": "x",
        "door": "key",
        "action": "key_limit",
        "resource": "key",
        "resource_id": "1",
        "outcome": "done",
    }
    row = {"tenant_id": cats.id, "at": service.clock(), "day": service.clock().date(), **entry}
    async with service.database.write() as transaction:
        await transaction.execute(insert(AuditEntry), [{**row, "before": values, "after": values}] * (MOST_ENTRIES + 1))
    admin, theirs = await as_administrator(cats), await as_administrator(dogs)
    path = f"{service.url}/api/weft/v1/audit?limit={MOST_ENTRIES}&resource=key"
    shown = await in_short_steps(admin, path, dogs)
    told, cursor = [one["id"] for one in shown["entries"]], shown["next_cursor"]
    assert {one["after"]["value-0"] for one in shown["entries"]} == {"x" * 200}
    # A page ends early where its entries are large.
    assert len(told) < MOST_ENTRIES
    while cursor is not None:
        further = (await admin.http.get(f"{path}&cursor={cursor}")).json()
        told, cursor = [*told, *(one["id"] for one in further["entries"])], further["next_cursor"]
    assert told == list(range(max(told), max(told) - MOST_ENTRIES - 1, -1))
    day = await in_short_steps(admin, "/audit?event_type=organizations", dogs)
    assert len(day["entries"]) == MOST_ENTRIES + 1
    assert (await theirs.http.get(path)).json()["entries"] == []


async def test_the_most_lines_of_usage(cats: Tenant, dogs: Tenant) -> None:
    """Ask for JSON. Each line is of a session of its own; another tenant has none of them."""
    hour = cats.service.clock().replace(minute=0, second=0, microsecond=0)
    named = {"tenant_id": cats.id, "hour": hour, "key_id": 1, "base_model": BASE, "kind": "forward", "run_id": ""}
    sums = dict.fromkeys(SUMS, 1)
    rows = [{"session_id": f"{number:032x}", **named, **sums} for number in range(MOST_LINES)]
    async with cats.service.database.write() as transaction:
        await transaction.execute(insert(UsageHour), rows)
    path = f"/api/weft/v1/usage?since=2020-01-01T00:00:00Z&group_by=session&group_by=kind&limit={MOST_LINES}"
    shown = await in_short_steps(cats, f"{cats.service.url}{path}", dogs)
    assert [one["session"] for one in shown["lines"]] == [row["session_id"] for row in rows]
    assert (await dogs.http.get(f"{cats.service.url}{path}")).json()["lines"] == []


async def test_the_most_keys_of_a_tenant_with_the_most_bounds(cats: Tenant, dogs: Tenant) -> None:
    """Ask for an answer of the API, and for the page. Another tenant sees its own alone."""
    service, names = cats.service, [f"{number:02}{'x' * 160}" for number in range(50)]
    row = {
        "tenant_id": cats.id,
        "secret_hash": bytes(32),
        "note": "x" * 200,
        "created_at": service.clock(),
        "role": "member",
        "base_models": names,
    }
    admin, theirs = await as_administrator(cats), await key_of(service, dogs)
    rows = [{"prefix": f"tml-{number:012x}", **row} for number in range(MOST_KEYS - 2)]
    async with service.database.write() as transaction:
        await transaction.execute(insert(ApiKey), rows)
    shown = await in_short_steps(admin, f"{service.url}/api/weft/v1/keys", dogs)
    assert [one["prefix"] for one in shown["keys"][2:]] == [row["prefix"] for row in rows]
    assert shown["keys"][-1]["base_models"] == names
    async with (
        visitor(service, admin.http.headers["X-API-Key"]) as http,
        visitor(service, theirs.secret) as other,
    ):
        page = (await answered_in_short_steps(http, "/ui/keys", dogs)).text
        assert page.count("<tr data-key=") == MOST_KEYS
        assert rows[0]["prefix"] not in (await other.get("/ui/keys")).text


async def test_the_standing_of_a_tenant_with_many_limited_projects(cats: Tenant, dogs: Tenant) -> None:
    service, bounds = cats.service, dict.fromkeys(PROJECT_LIMITS, 9)
    row = {"tenant_id": cats.id, "created_at": service.clock(), "limits": bounds}
    rows = [{"id": f"proj-{number:04}", "name": f"{number:04}", **row} for number in range(MOST_PROJECTS)]
    async with service.database.write() as transaction:
        await transaction.execute(insert(Project), rows)
    path = f"{service.url}/api/weft/v1/usage/standing"
    shown = await in_short_steps(cats, path, dogs)
    assert [one["id"] for one in shown["projects"]] == [row["id"] for row in rows]
    assert {len(one["limits"]) for one in shown["projects"]} == {len(bounds)}
    assert (await dogs.http.get(path)).json()["projects"] == []


async def with_metadata(tenant: Tenant) -> list[str]:
    """Record as many runs and checkpoints as a page shows, each with metadata of many entries; return the runs."""
    service, session = tenant.service, await tenant.session()
    told, now = {f"key-{number:04}": "x" for number in range(ENTRIES)}, service.clock()
    runs = [
        {
            "id": run_id_for(session, number),
            "session_id": session,
            "model_seq_id": number,
            "base_model": BASE,
            "rank": 8,
            "alpha": 32.0,
            "seed": 1,
            "train_attn": True,
            "train_mlp": True,
            "train_unembed": False,
            "state": RunState.READY,
            "last_request_at": now,
        }
        for number in range(MAX_LIMIT)
    ]
    saved = [
        {
            "id": f"{number:032x}",
            "run_id": runs[number]["id"],
            "segment": Segment.SAMPLER_WEIGHTS,
            "name": "one",
            "directory": f"checkpoints/{number:032x}",
            "size_bytes": 1,
        }
        for number in range(MAX_LIMIT)
    ]
    async with service.database.write() as transaction:
        for table, rows in ((Run, runs), (Checkpoint, saved)):
            named = {"tenant_id": tenant.id, "user_metadata": told}
            times = [{"created_at": now - timedelta(seconds=number)} for number in range(MAX_LIMIT)]
            values = [row | named | time for row, time in zip(rows, times, strict=True)]
            await transaction.execute(insert(table), values)
    return [row["id"] for row in runs]


async def test_the_largest_pages_of_runs_and_checkpoints_with_the_most_metadata(cats: Tenant, dogs: Tenant) -> None:
    """Tinker's lists and weft's own: another tenant has none of them.

    A page read at once is decoded, checked and encoded in three steps.
    """
    runs = await with_metadata(cats)
    paths = [f"tinker://{run}/sampler_weights/one" for run in runs]
    kept = f"{cats.service.url}/api/weft/v1/checkpoints"
    for path, rows, name, ids in (
        ("/training_runs", "training_runs", "training_run_id", runs),
        ("/checkpoints", "checkpoints", "tinker_path", paths),
        (kept, "checkpoints", "tinker_path", paths),
    ):
        shown = await in_short_steps(cats, f"{path}?limit={MAX_LIMIT}", dogs, parts=5)
        assert [one[name] for one in shown[rows]] == ids
        assert {len(one["user_metadata"]) for one in shown[rows]} == {ENTRIES}
        assert shown["cursor"]["total_count"] == MAX_LIMIT
        part = (await cats.http.get(f"{path}?limit=120&offset=70")).json()
        assert part[rows] == shown[rows][70:190]
        assert (await dogs.http.get(path)).json()[rows] == []
    cursor, told = "", []
    while cursor is not None:
        further = (await cats.http.get(f"{kept}?limit=300{cursor and '&cursor='}{cursor}")).json()
        told, cursor = [*told, *(one["tinker_path"] for one in further["checkpoints"])], further["next_cursor"]
    assert told == paths


async def test_lists_that_show_no_metadata_read_none(cats: Tenant, dogs: Tenant) -> None:
    service = cats.service
    for tenant in (cats, dogs):
        await tenant.checkpoint(await tenant.run(), "one", segment=Segment.SAMPLER_WEIGHTS)
    sent: list[str] = []
    assert service.database.surveys is not None
    engine = service.database.surveys.engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *told: sent.append(told[2]))
    adapters = (await cats.http.get(f"{service.url}/api/weft/v1/adapters")).json()["adapters"]
    models = (await cats.http.get(f"{service.url}/v1/models")).json()["data"]
    assert (len(adapters), len(models)) == (1, 3)
    assert sent
    assert not [one for one in sent if "user_metadata" in one or "metric_names" in one]
