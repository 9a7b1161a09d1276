"""Promises of single pages in a browser: usage to the token, one row a failure, too many guesses, processes that end, a flood."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial

import httpx
import pytest
from playwright.sync_api import Page, Route, expect
from sqlalchemy import delete, update

from api.dashboard.login_guard import MOST_WRONG
from store.database import Database
from store.tables import WorkerProcess
from tests.e2e.conftest import BASE_NAME, make_key, make_tenant
from tests.e2e.raw_client import RawClient, pass_message
from tests.ui.conftest import UiService, UiTenant
from tests.ui.stored import write_rows

EDGES = """
all => all.map((bar) => {
  const whole = bar.getBoundingClientRect();
  const parts = [...bar.querySelectorAll("rect")].map((one) => one.getBoundingClientRect()).filter((one) => one.width);
  if (!whole.height || !parts.length) return [];
  return [
    Math.max(...parts.map((one) => one.top)) - whole.top,
    whole.bottom - Math.min(...parts.map((one) => one.bottom)),
    Math.min(...parts.map((one) => one.left)) - whole.left,
    whole.right - Math.max(...parts.map((one) => one.right)),
  ];
})
"""
"""Distances of a bar's parts from the edges of its place."""
LEASE = 4.0
BUSY_SECONDS = 20.0
"""Time that a busy machine may take for a page."""
"""Seconds of a made-up process's lease."""
POLL = 2.0
"""Seconds between two looks of the page of processes."""


@pytest.fixture(scope="module")
def owls(ui_service: UiService) -> UiTenant:
    """A tenant that nobody else works as: its numbers are those of its test."""
    make_tenant(ui_service.data, "owls")
    key = make_key(ui_service.data, "owls", role="admin")
    return UiTenant("owls", ui_service.data, key, {"admin": key})


@pytest.fixture
def client(ui_service: UiService, owls: UiTenant) -> Iterator[RawClient]:
    made = RawClient(ui_service.url, owls.key)
    yield made
    made.close()


COLUMNS = {
    "Operations": "operations",
    "Failed": "failed",
    "Trained": "train_tokens",
    "Prompts": "prompt_tokens",
    "Cached prompts": "cached_prompt_tokens",
    "Sampled": "sampled_tokens",
}
"""Columns of the page of usage, and their names in the API."""


def cells_of(page: Page) -> list[dict[str, str]]:
    """Return the rows of the page's table by the titles of its columns, without the spaces of large numbers."""
    titles = page.locator(".table-wrap thead th").all_inner_texts()
    rows = page.locator(".table-wrap tbody tr").evaluate_all(
        "all => all.map((row) => [...row.cells].map((cell) => cell.textContent.replaceAll(/[\\s\u202f]/g, '')))"
    )
    return [dict(zip(titles, row, strict=True)) for row in rows]


@pytest.fixture
def finches(ui_service: UiService) -> UiTenant:
    """A tenant that has trained, failed and sampled."""
    make_tenant(ui_service.data, "finches")
    key = make_key(ui_service.data, "finches", role="admin")
    with closing(RawClient(ui_service.url, key)) as client:
        run = client.model(BASE_NAME)
        client.result(client.passes(pass_message(run, 1, [7] * 1700)))
        client.result(client.step(run, 2))
        client.result(client.post("/load_weights", model_id=run, path=f"tinker://{run}/weights/never-saved", seq_id=3))
        for _ in range(2):
            asked = {"model": BASE_NAME, "prompt": list(range(1, 49)), "max_tokens": 5, "temperature": 0}
            client.http.post(f"{ui_service.url}/v1/completions", json=asked).raise_for_status()
    return UiTenant("finches", ui_service.data, key, {"admin": key})


def test_every_column_of_usage_is_the_apis(browse, ui_service, finches) -> None:
    since = (datetime.now(UTC) - timedelta(days=7)).isoformat()
    query = {"bucket_width": "1h", "group_by": ["kind", "base_model"], "since": since}
    address = f"{ui_service.url}/api/weft/v1/usage"
    told = httpx.get(address, params=query, headers={"X-API-Key": finches.key}, timeout=40).raise_for_status().json()
    assert all(sum(line[name] for line in told["lines"]) > 0 for name in COLUMNS.values() if "cached" not in name)
    page, beside = browse(finches), browse(ui_service.dogs)
    for one in (page, beside):
        one.goto("/ui/usage?days=7&width=1h&by=kind&by=base_model")
    shown = [[row["Kind"], *(row[title] for title in COLUMNS)] for row in cells_of(page)]
    assert shown == [[line["kind"] or "–", *(str(line[name]) for name in COLUMNS.values())] for line in told["lines"]]
    assert not any(row["Trained"] == "1700" for row in cells_of(beside))


def test_usage_is_the_apis_to_the_token(browse, axe, ui_service, owls, client) -> None:
    run = client.model(BASE_NAME)
    client.result(client.passes(pass_message(run, 1, list(range(1, 24)))))
    told = httpx.get(
        f"{ui_service.url}/api/weft/v1/usage",
        params={"bucket_width": "1d", "group_by": "kind", "since": (datetime.now(UTC) - timedelta(days=7)).isoformat()},
        headers={"X-API-Key": owls.key},
        timeout=40,
    ).json()
    page = browse(owls)
    page.goto("/ui/usage?days=7&width=1d&by=kind")
    shown = page.locator("td[data-train]").evaluate_all(
        "cells => cells.map((one) => [one.dataset.train, one.parentElement.querySelector('[data-sampled]').dataset.sampled])"
    )
    lines = [(str(one["train_tokens"]), str(one["sampled_tokens"])) for one in told["lines"]]
    assert sorted(tuple(one) for one in shown) == sorted(lines)
    assert sum(int(train) for train, _ in shown) == 23
    (edges,) = [one for one in page.locator("svg.usage-bar").evaluate_all(EDGES) if one]
    assert edges == pytest.approx([0, 0, 0, 0], abs=0.5), "the largest line's bar fills its place"
    axe(page)
    file = page.request.get("/ui/usage.csv?days=7&width=1d&by=kind").text().splitlines()
    place = file[0].split(",").index("train_tokens")
    assert sum(int(row.split(",")[place]) for row in file[1:]) == 23


def test_a_failed_operation_is_one_row_with_the_text_that_its_client_was_told(
    browse, axe, ui_service, owls, client
) -> None:
    run = client.model(BASE_NAME)
    request = client.post("/load_weights", model_id=run, path=f"tinker://{run}/weights/never-saved", seq_id=1)
    error = client.result(request)["error"]
    page = browse(owls)
    page.goto("/ui/errors")
    rows = page.locator("[aria-labelledby=failed] tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(error)
    axe(page)
    other = browse(ui_service.dogs)
    other.goto("/ui/errors")
    assert "never-saved" not in other.content()


def test_the_eleventh_wrong_key_of_a_minute_has_to_wait_and_another_address_logs_in(
    browse, axe, watched, ui_service
) -> None:
    """The browser's forms are sent on from an address of their own, since wrong keys are counted by address."""
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.3")
    page = browse(None)
    watched[0].expected += ["401", "429"]

    with httpx.Client(transport=elsewhere, timeout=40) as stranger:

        def send_on(route: Route) -> None:
            if route.request.method != "POST":
                route.continue_()
                return
            headers = {"Sec-Fetch-Site": "same-origin", "Content-Type": "application/x-www-form-urlencoded"}
            answer = stranger.post(route.request.url, content=route.request.post_data or "", headers=headers)
            route.fulfill(status=answer.status_code, headers=dict(answer.headers), body=answer.content)

        page.route("**/ui/login", send_on)
        for number in range(MOST_WRONG + 1):
            page.goto("/ui/login")
            page.get_by_label("API key").fill(f"guess {number}")
            with page.expect_response("**/ui/login") as answered:
                page.get_by_role("button", name="Log in").click()
            assert answered.value.status == (401 if number < MOST_WRONG else 429)
    expect(page.get_by_role("alert")).to_contain_text(re.compile("wait a minute|too many logins"))
    axe(page)
    browse(ui_service.cats)


def process_of(kind: str, ends: datetime) -> WorkerProcess:
    """A process of a base model that no other serves, which renews its lease no more."""
    return WorkerProcess(
        id=f"{kind}-mortal",
        kind=kind,
        base_model="weft/mortal",
        host="elsewhere",
        pid=7,
        started_at=datetime.now(UTC),
        expires_at=ends,
    )


@pytest.mark.parametrize("kind", ["trainer", "pool"])
def test_a_process_that_ends_is_told_within_its_lease_and_the_others_work_on(operate, ui_service, kind) -> None:
    async def add(database: Database, ends: datetime) -> None:
        async with database.write() as transaction:
            transaction.add(process_of(kind, ends))

    async def last_renewal(database: Database) -> None:
        ends = datetime.now(UTC) + timedelta(seconds=LEASE)
        async with database.write() as transaction:
            mortal = update(WorkerProcess).where(WorkerProcess.base_model == "weft/mortal")
            await transaction.execute(mortal.values(expires_at=ends))

    page = operate()
    page.goto("/ops/processes")
    write_rows(ui_service.data, partial(add, ends=datetime.now(UTC) + timedelta(hours=1)))
    row = page.locator(f"tr[data-process={kind}-mortal]")
    works = row.locator(".badge-good")
    expect(works).to_have_count(1)
    expect(row.locator("time").first).to_be_visible()
    write_rows(ui_service.data, last_renewal)
    expect(works).to_have_count(0, timeout=1000 * (LEASE + POLL + BUSY_SECONDS))
    alive = page.locator("tr[data-process]", has_text=BASE_NAME).locator(".badge-good")
    expect(alive).to_have_count(2)

    async def remove(database: Database) -> None:
        async with database.write() as transaction:
            await transaction.execute(delete(WorkerProcess).where(WorkerProcess.base_model == "weft/mortal"))

    write_rows(ui_service.data, remove)


def test_a_flood_is_one_band_of_its_tenant(operate, ui_service, speakers, cat) -> None:
    dog = speakers[1]
    cat.gate("pause", timeout_seconds=0)
    dog.gate("pause", timeout_seconds=0)
    flood, beside = [cat.send(tokens=2) for _ in range(18)], [dog.send(tokens=2) for _ in range(2)]
    page = operate()
    page.goto("/ops/queue")
    line = page.locator("tbody tr", has=page.locator("code", has_text="sample"))
    expect(line.locator("td.number").first).to_have_text(str(len(flood) + len(beside)))
    legend = line.locator(".legend li")
    expect(legend).to_have_count(2)
    expect(legend.first).to_have_text(re.compile(r"cats\s+90\s%"))
    expect(legend.last).to_have_text(re.compile(r"dogs\s+10\s%"))
    with sqlite3.connect(ui_service.data / "weft.db") as database:
        in_sql = database.execute(
            "SELECT t.name, count(*) FROM operations o JOIN tenants t ON t.id = o.tenant_id "
            "WHERE o.state = 'pending' AND o.kind = 'sample' GROUP BY t.name ORDER BY t.name"
        ).fetchall()
    assert in_sql == [("cats", len(flood)), ("dogs", len(beside))]
    widths = line.locator("svg.bands rect[class^=band]").evaluate_all(
        "all => all.map((one) => Number(one.getAttribute('width')))"
    )
    assert widths == [90.0, 10.0]
    for one in (cat, dog):
        one.gate("resume")
