"""Usage over HTTP: by hour in the SDK's form and in weft's own, with the same totals, and a tenant's own."""

import asyncio
import base64
import csv
import io
import json
import os
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import insert, update
from tinker.types.billing_usage_response import BillingUsageResponse

from ledger.pruning import prune
from store.tables import ApiKey, Operation, StorageHour
from tenants.price_additions import NewPrice, add_price
from tenants.prices import PricedQuantity
from tenants.projects import create_project
from tenants.rights import Role
from tenants.sessions import NewSession, create_session

HOUR = timedelta(hours=1)


@pytest_asyncio.fixture(autouse=True)
async def billing_keys(cats, dogs) -> None:
    """Let the tenants' keys see what was used, which a member's key may not."""
    async with cats.service.database.write() as transaction:
        await transaction.execute(update(ApiKey).values(role=Role.BILLING))


async def test_a_members_key_sees_no_bill(cats) -> None:
    async with cats.service.database.write() as transaction:
        await transaction.execute(update(ApiKey).values(role=Role.MEMBER))
    for path in ("/billing/usage/checkpoints/current", "/billing/usage/events"):
        assert (await cats.http.get(path, params=window(cats))).status_code == 403


async def ended(tenant, lane: str, number: int, **columns: object) -> None:
    """Record an operation that has ended now."""
    now = tenant.service.clock()
    row = {
        "id": f"{tenant.id}-{number}",
        "tenant_id": tenant.id,
        "lane": lane,
        "seq_id": number,
        "kind": "forward_backward",
        "base_model": "test/tiny",
        "state": "done",
        "body_digest": b"",
        "tokens": 10,
        "created_at": now,
        "finished_at": now,
        "key_id": 1,
    }
    async with tenant.service.database.write() as transaction:
        await transaction.execute(insert(Operation), [row | columns])


async def work(tenant) -> str:
    """Have a pass, a sample and a save ended, and an hour of storage; return the session."""
    session = await tenant.session()
    await ended(tenant, f"{session}:train:0", 1)
    sample = {"kind": "sample", "tokens": 11, "sampled_tokens": 5, "cached_tokens": 4}
    await ended(tenant, f"{session}:sample:0", 2, **sample)
    await ended(tenant, f"{session}:train:0", 3, kind="save_weights", tokens=0)
    hour = {
        "tenant_id": tenant.id,
        "hour": tenant.service.clock(),
        "project": tenant.id,
        "nbytes": 2 * 10**9,
        "checkpoints": 1,
    }
    async with tenant.service.database.write() as transaction:
        await transaction.execute(insert(StorageHour), [hour])
    return session


def window(tenant) -> dict[str, str]:
    now = tenant.service.clock()
    return {"starting_on": (now - HOUR).isoformat(), "ending_before": (now + HOUR).isoformat()}


async def test_billing_tells_each_kind_of_usage_apart(cats, dogs) -> None:
    session = await work(cats)
    await work(dogs)
    answer = (await cats.http.get("/billing/usage/events", params=window(cats))).json()
    assert [one["event_info"] for one in answer["data"]] == [
        {"type": "training", "token_count": 10},
        {"type": "sampling_sample", "token_count": 5},
        {"type": "sampling_prefill", "cached": True, "token_count": 4},
        {"type": "sampling_prefill", "cached": False, "token_count": 2},
        {"type": "checkpoint", "count": 1},
        {"type": "storage", "free": False, "gigabyte_hours": 2.0},
    ]
    assert {one["session_id"] for one in answer["data"]} == {session, None}
    assert set(answer["sessions"]) == {session}
    assert answer["data"][0]["user_id"].startswith("tml-")
    assert all(one["estimated_cost_usd"] is None for one in answer["data"])


async def test_what_was_pruned_is_told_as_before(cats) -> None:
    await work(cats)
    before = (await cats.http.get("/billing/usage/events", params=window(cats))).json()
    async with cats.service.database.write() as transaction:
        now = cats.service.clock() + HOUR
        assert await prune(transaction, finished_before=now, now=now) == 3
    assert (await cats.http.get("/billing/usage/events", params=window(cats))).json() == before


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("2026-01-01T00:30:00Z", "2026-01-01T02:00:00Z"),
        ("2026-01-01T00:00:00", "2026-01-01T02:00:00Z"),
        ("2026-01-01T02:00:00Z", "2026-01-01T00:00:00Z"),
        ("2026-01-01T00:00:00Z", "2026-01-16T00:00:00Z"),
        ("0001-01-01T00:00:00+14:00", "9999-12-31T23:00:00-14:00"),
        ("9999-12-31T00:00:00Z", "9999-12-31T23:00:00Z"),
        ("yesterday", "2026-01-16T00:00:00Z"),
    ],
)
async def test_a_window_that_is_no_whole_hours_is_refused(cats, begin: str, end: str) -> None:
    answer = await cats.http.get("/billing/usage/events", params={"starting_on": begin, "ending_before": end})
    assert answer.status_code == 400


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:00:00-14:00", "2026-01-01T00:00:00"])
async def test_a_time_that_no_database_holds_is_refused_wherever_one_is_sent(cats, time: str) -> None:
    async with cats.service.database.write() as transaction:
        await transaction.execute(update(ApiKey).values(role=Role.ADMIN))
    own = f"{cats.service.url}/api/weft/v1"
    answers = [
        await cats.http.get(f"{own}/usage", params={"since": time}),
        await cats.http.get(f"{own}/usage", params={"since": "2026-01-01T00:00:00Z", "before": time}),
        await cats.http.post(f"{own}/keys", json={"expires_at": time}),
        await cats.http.post("/sessions/search", json={"cursor": {"last_session_id": "x", "last_created_at": time}}),
    ]
    assert [answer.status_code for answer in answers] == [400] * 4


async def test_storage_now_is_by_project_and_of_the_tenant(cats, dogs) -> None:
    run = await cats.run()
    for name in ("one", "two"):
        await cats.checkpoint(run, name)
    mine = (await cats.http.get("/billing/usage/checkpoints/current")).json()
    assert [(one["project_id"], one["checkpoint_count"], one["size_bytes"]) for one in mine["data"]] == [
        (cats.id, 2, 14)
    ]
    assert (await dogs.http.get("/billing/usage/checkpoints/current")).json()["data"] == []


async def test_storage_now_of_one_project_is_asked_for_by_its_id_or_name(cats, dogs) -> None:
    async with cats.service.database.write() as transaction:
        archive = (await create_project(transaction, cats.id, "archive", cats.service.clock)).id
        new = NewSession([], None, "0.38.0", archive, None)
        session = await create_session(transaction, cats.id, new, cats.service.clock)
    for run in (await cats.run(), await cats.run(session=session)):
        await cats.checkpoint(run, "one")
    for named, project in (("default", cats.id), (cats.id, cats.id), ("archive", archive), (archive, archive)):
        of_one = await cats.http.get("/billing/usage/checkpoints/current", params={"project_id": named})
        assert [one["project_id"] for one in of_one.json()["data"]] == [project], named
    for tenant, named in ((cats, "p-none"), (dogs, archive), (dogs, "archive")):
        refused = await tenant.http.get("/billing/usage/checkpoints/current", params={"project_id": named})
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


async def test_own_usage_has_the_same_totals_for_every_grouping_and_in_csv(cats, dogs) -> None:
    await work(cats)
    await work(dogs)
    url = f"{cats.service.url}/api/weft/v1/usage"
    since = (cats.service.clock() - HOUR).isoformat()
    totals = set()
    for by in ([], ["kind"], ["session", "run"], ["project", "key", "base_model", "kind"]):
        lines = (await cats.http.get(url, params={"since": since, "group_by": by})).json()["lines"]
        totals.add(
            (sum(one["operations"] for one in lines), sum(one["train_tokens"] + one["prompt_tokens"] for one in lines))
        )
    assert totals == {(3, 16)}
    text = (await cats.http.get(url, params={"since": since, "group_by": "kind", "format": "csv"})).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["kind"], row["sampled_tokens"]) for row in rows] == [
        ("forward_backward", "0"),
        ("sample", "5"),
        ("save_weights", "0"),
    ]


async def test_usage_as_csv_without_a_limit_has_every_line_and_no_other_tenants(cats, dogs) -> None:
    session, other = await work(cats), await work(dogs)
    url = f"{cats.service.url}/api/weft/v1/usage"
    query = {"since": (cats.service.clock() - HOUR).isoformat(), "group_by": ["session", "kind"]}
    lines = (await cats.http.get(url, params=query)).json()["lines"]
    whole = await cats.http.get(url, params=query | {"format": "csv"})
    rows = list(csv.DictReader(io.StringIO(whole.text)))
    assert [(row["session"], row["kind"], row["operations"]) for row in rows] == [
        (session, one["kind"], str(one["operations"])) for one in lines
    ]
    assert other not in whole.text
    assert whole.headers["content-disposition"] == 'attachment; filename="usage.csv"'
    page = await cats.http.get(url, params=query | {"format": "csv", "limit": 2})
    assert (page.text.count("\r\n"), page.headers["x-next-offset"]) == (3, "2")
    rest = await cats.http.get(url, params=query | {"format": "csv", "cursor": page.headers["x-next-cursor"]})
    assert page.text + rest.text.partition("\r\n")[2] == whole.text
    assert "x-next-cursor" not in rest.headers


async def test_own_usage_comes_in_pages(cats) -> None:
    await work(cats)
    url = f"{cats.service.url}/api/weft/v1/usage"
    query = {"since": (cats.service.clock() - HOUR).isoformat(), "group_by": "kind", "limit": 2}
    first = (await cats.http.get(url, params=query)).json()
    second = (await cats.http.get(url, params=query | {"offset": first["next_offset"]})).json()
    assert [one["kind"] for one in first["lines"] + second["lines"]] == ["forward_backward", "sample", "save_weights"]
    assert second["next_offset"] is None
    assert (await cats.http.get(url, params={"since": "2026-01-01T00:00:00"})).status_code == 400


@pytest.mark.parametrize("by", [("kind",), ("base_model", "kind"), ("key", "kind")])
async def test_lines_that_come_while_pages_are_read_double_and_hide_no_other(cats, dogs, by: tuple[str, ...]) -> None:
    session = await work(cats)
    await work(dogs)
    url = f"{cats.service.url}/api/weft/v1/usage"
    query = {"since": (cats.service.clock() - HOUR).isoformat(), "group_by": by}
    before = (await cats.http.get(url, params=query)).json()["lines"]
    cursor, seen = None, []
    for number in range(9, 12):
        given = {} if cursor is None else {"cursor": cursor}
        answer = (await cats.http.get(url, params=query | given | {"limit": 1})).json()
        seen += answer["lines"]
        cursor = answer["next_cursor"]
        # In each of the groupings before the lines that there are.
        await ended(cats, f"{session}:train:0", number, kind=f"a{number}", base_model=f"a{number}", key_id=None)
    assert seen == before
    assert (cursor, answer["next_offset"]) == (None, None)


@pytest.mark.parametrize(
    "place",
    [
        "x",
        ["2026-01-01T00:00:00", "sample"],
        ["2026-01-01T00:00:00+00:00"],
        ["2026-01-01T00:00:00+00:00", 1],
        ["2026-01-01T00:00:00+00:00", "a\0"],
        ["2026-01-01T00:00:00+00:00", "\ud800"],
        [7, "sample"],
        ["0001-01-01T00:00:00+14:00", "sample"],
        {},
    ],
)
async def test_a_cursor_of_another_question_is_refused(cats, place: object) -> None:
    url = f"{cats.service.url}/api/weft/v1/usage"
    query = {"since": (cats.service.clock() - HOUR).isoformat(), "group_by": "kind"}
    nested = base64.urlsafe_b64encode(b"[" * 3000).decode()
    for cursor in (base64.urlsafe_b64encode(json.dumps(place).encode()).decode(), "%%%", "é", nested):
        answer = await cats.http.get(url, params=query | {"cursor": cursor})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


async def priced(tenant, *, amounts: dict[PricedQuantity, str], currency: str = "USD") -> None:
    async with tenant.service.database.write() as transaction:
        for meter, amount in amounts.items():
            await add_price(transaction, NewPrice(meter, amount, currency), tenant.service.clock)


async def test_costs_are_the_same_in_the_sdks_form_and_in_wefts_and_null_without_a_price(cats, dogs) -> None:
    await work(cats)
    await work(dogs)
    await priced(
        cats,
        amounts={
            PricedQuantity.TRAIN_TOKENS: "3.3",
            PricedQuantity.PROMPT_TOKENS: "0.1",
            PricedQuantity.STORAGE: "0.72",
        },
    )
    events = (await cats.http.get("/billing/usage/events", params=window(cats))).json()
    by_type = {one["event_info"]["type"]: one for one in events["data"] if not one["event_info"].get("cached")}
    assert by_type["training"]["estimated_cost_usd"] == 0.000033
    assert by_type["training"]["effective_rate_usd_per_million_tokens"] == 3.3
    assert by_type["sampling_sample"]["estimated_cost_usd"] is None
    assert by_type["storage"]["estimated_cost_usd"] == 0.002
    assert events["cost_data_through"] is not None
    lines = await own_lines(cats, group_by="kind")
    assert {one["kind"]: one["cost"] for one in lines} == {
        "forward_backward": "0.000033",
        "sample": None,
        "save_weights": "0",
    }


async def test_prices_in_another_currency_are_told_in_wefts_own_form_only(cats) -> None:
    await work(cats)
    await priced(cats, amounts={PricedQuantity.TRAIN_TOKENS: "1"}, currency="EUR")
    events = (await cats.http.get("/billing/usage/events", params=window(cats))).json()
    assert all(one["estimated_cost_usd"] is None for one in events["data"])
    answer = await cats.http.get(f"{cats.service.url}/api/weft/v1/usage", params={"since": window(cats)["starting_on"]})
    assert answer.json()["currency"] == "EUR"


async def own_lines(tenant, **asked: str) -> list[dict[str, object]]:
    query = {"since": window(tenant)["starting_on"]} | asked
    answer = await tenant.http.get(f"{tenant.service.url}/api/weft/v1/usage", params=query)
    return answer.json()["lines"]


@pytest.mark.parametrize("form", ["focus", "cloudevents"])
async def test_an_export_has_what_has_ended_and_nothing_of_another_tenant(cats, dogs, form: str) -> None:
    session, other = await work(cats), await work(dogs)
    await priced(cats, amounts={PricedQuantity.TRAIN_TOKENS: "3"})
    route = f"{cats.service.url}/api/weft/v1/usage/export"
    query = {"since": window(cats)["starting_on"], "format": form}
    assert session not in (await cats.http.get(route, params=query)).text
    cats.service.clock.move(hours=2)
    first = await cats.http.get(route, params=query)
    text = first.text
    final = datetime.fromisoformat(first.headers["weft-final-before"])
    now = cats.service.clock()
    assert now - timedelta(hours=2) < final <= now - timedelta(hours=1)
    assert session in text
    assert other not in text
    if form == "focus":
        rows = list(csv.DictReader(io.StringIO(text)))
        (trained,) = (row for row in rows if row["SkuMeter"] == "train_tokens")
        assert (trained["BilledCost"], trained["ConsumedQuantity"], trained["BillingCurrency"]) == (
            "0.00003",
            "10",
            "USD",
        )
    else:
        events = [json.loads(line) for line in text.splitlines()]
        assert len({one["id"] for one in events}) == len(events) == 5
        costs = {one["data"]["meter"]: one["data"]["cost"] for one in events}
        assert costs == dict.fromkeys(costs) | {"train_tokens": "0.00003"}
    assert (await cats.http.get(route, params=query)).content == first.content


@pytest.mark.parametrize("form", ["csv", "focus"])
async def test_no_cell_of_a_file_is_a_formula(cats, dogs, form: str) -> None:
    """A base's name may begin with anything; a spreadsheet computes what begins with these."""
    names = ["=1+1", "+1", "-1+1", "@SUM(1)", "\t=1+1", "\r=1+1"]
    session = await cats.session()
    for number, name in enumerate(names, 1):
        await ended(cats, f"{session}:train:0", number, base_model=name)
    await work(dogs)
    since = window(cats)["starting_on"]
    cats.service.clock.move(hours=2)
    url = f"{cats.service.url}/api/weft/v1/usage"
    asked = (
        {"since": since, "group_by": "base_model", "format": "csv"}
        if form == "csv"
        else {"since": since, "format": form}
    )
    text = (await cats.http.get(url if form == "csv" else f"{url}/export", params=asked)).text
    cells = [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    assert not [one for one in cells if one.startswith(("=", "+", "-", "@", "\t", "\r"))]
    assert all(any(name in one for one in cells) for name in names)


async def test_the_sdk_reads_usage_whose_sessions_have_metadata_that_is_no_text(cats, dogs) -> None:
    """The SDK takes text alone, and one session would cost it the whole window."""
    told = {}
    for tenant in (cats, dogs):
        sent = {"user_metadata": {"lr": 0.1, "cfg": {"a": 1}, "note": tenant.id}, "sdk_version": "0.38.0", "tags": []}
        made = (await tenant.http.post("/create_session", json=sent)).raise_for_status().json()["session_id"]
        await ended(tenant, f"{made}:train:0", 1)
        told[tenant.id] = made
    found = (await cats.http.get("/billing/usage/events", params=window(cats))).raise_for_status()
    read = BillingUsageResponse.model_validate_json(found.content)
    assert {id: one.user_metadata for id, one in read.sessions.items()} == {
        told[cats.id]: {"lr": "0.1", "cfg": '{"a":1}', "note": cats.id}
    }
    begin, end = (window(cats)[name] for name in ("starting_on", "ending_before"))
    environment = os.environ | {"TINKER_BASE_URL": cats.service.url, "TINKER_API_KEY": cats.key}
    command = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("tinker"),
        *("--format", "json", "billing", "usage", begin, end),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    async with asyncio.timeout(60):
        _, said = await command.communicate()
    assert command.returncode == 0, said.decode()
