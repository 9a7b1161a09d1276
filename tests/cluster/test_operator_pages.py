"""Operators' pages of a working cluster: what dies is red within its lease, and who took it over; what is pressed is done."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from api.dashboard.rendering import count
from bench.chaos.tenant import ChaosTenant
from testing.chromium import chromium_path
from tests.cluster.conftest import BASE, LEASE_SECONDS, Cluster, at_work, recovered
from tests.cluster.test_faults import names, trainer_of
from tests.cluster.test_operators import command, keep_apart, run_of
from tests.conftest import missing_service
from tests.ui.browser import SECONDS, launched, log_in, watched_context

POLL = 2.0
"""Seconds between two looks of a page at what changes."""
RED_SECONDS = LEASE_SECONDS + POLL + 20.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if chromium_path() is None:
        missing_service("Chromium", "`chromium` is not on the path; `.ci/chromium` installs Debian's")
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright:
        started = launched(playwright)
        yield started
        started.close()


@pytest.fixture(scope="module")
def aside() -> Iterator[ThreadPoolExecutor]:
    """A thread for what needs an event loop of its own: Playwright has one in the tests'."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture(scope="module")
def operate(browser: Browser, whole_cluster: Cluster, aside: ThreadPoolExecutor) -> Iterator[Callable[[str], Page]]:
    """Give a page of the operators: ``operate("processes")``. An API that dies may take a request of the page with it."""
    whole_cluster.settle()
    key = aside.submit(command, whole_cluster, "operator", "create", "--note", "browser").result().strip()
    with watched_context(browser, f"http://127.0.0.1:{whole_cluster.admin_port}") as (context, watched):
        watched.expected += ["ERR_CONNECTION", "ERR_EMPTY_RESPONSE", "Failed to fetch", "503", "NetworkError"]
        page = context.new_page()
        page.goto("/ops")
        page.get_by_label("Operator's key").fill(key)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()

        def opened(name: str) -> Page:
            page.goto(f"/ops/{name}")
            return page

        yield opened


@pytest.fixture(scope="module")
def tenants(whole_cluster: Cluster, aside: ThreadPoolExecutor) -> Iterator[tuple[list[ChaosTenant], str, str]]:
    """Two tenants at work, with their names. In the end nothing of theirs may be lost, doubled or failed."""
    cats, dogs = names()
    whole_cluster.settle()
    work = at_work(whole_cluster, cats, dogs)
    yield aside.submit(work.__enter__).result(), cats, dogs
    aside.submit(work.__exit__, None, None, None).result()


@pytest.fixture
def run_page(browser: Browser, whole_cluster: Cluster, aside: ThreadPoolExecutor) -> Iterator[Callable[[str], Page]]:
    """Give a tenant's page of its run."""
    with watched_context(browser, whole_cluster.process.base_url) as (context, _):

        def opened(tenant: str) -> Page:
            key = aside.submit(command, whole_cluster, "key", "create", "--tenant", tenant).result().strip()
            page = context.new_page()
            log_in(page, key)
            page.goto(f"/ui/runs/{run_of(whole_cluster, tenant)}")
            expect(page.locator("#curve")).to_have_attribute("data-live", "open")
            return page

        yield opened


def test_a_killed_trainer_is_told_dead_with_who_took_its_runs_and_curves_go_on(
    cluster: Cluster, operate, tenants, run_page
) -> None:
    working, cats, dogs = tenants
    home, process = trainer_of(cluster, cats)
    keep_apart(cluster, dogs, home)
    other, _ = trainer_of(cluster, dogs)
    curve, page = run_page(cats), operate("processes")
    expect(page.locator(f'tr[data-process="{home}"] .badge-good')).to_be_visible()
    killed = time.monotonic()
    cluster.process.kill_child(process)
    row = page.locator(f'tr[data-ended="{home}"]')
    expect(row.locator(".badge-bad")).to_be_visible(timeout=1000 * RED_SECONDS)
    expect(row).to_contain_text(re.compile(r"1 run now with"))
    assert recovered(working, killed)
    taker, _ = trainer_of(cluster, cats)
    assert taker != home
    expect(row.locator(f'a[href="/ops/runs?trainer={taker}"]')).to_be_visible()
    expect(page.locator(f'tr[data-process="{home}"]')).to_have_count(0)
    expect(page.locator(f'tr[data-process="{other}"] .badge-good')).to_be_visible()
    expect(curve.locator('#marks tr[data-kind="trainer_lost"]')).to_have_count(1)
    reached = working[0].account.steps
    expect(curve.locator("#points tbody tr td:first-child").first).to_have_text(at_least(reached))
    losses = working[0].account.losses[:reached]
    points = curve.evaluate("async () => (await fetch(document.getElementById('curve').dataset.url + '/curve')).json()")
    assert points["step"] == list(range(1, len(points["step"]) + 1)), "no gap, and no point twice"
    tokens = working[0].batch(0).shape
    per_token = [loss / (tokens[0] * (tokens[1] - 1)) for loss in losses]
    assert points["value"][:reached] == pytest.approx(per_token, abs=1e-5)


def at_least(number: int) -> re.Pattern[str]:
    """Match whole numbers from ``number`` to a thousand beyond."""
    return re.compile(rf"^\s*({'|'.join(map(count, range(number, number + 1000)))})\s*$")


def test_replicas_of_a_frozen_pool_are_red_within_its_lease_and_no_sample_fails(
    cluster: Cluster, operate, tenants
) -> None:
    working, _, _ = tenants
    page = operate("replicas")
    rows = page.locator("tbody tr[data-replica]", has_text=BASE)
    expect(rows.locator(".badge-good")).to_have_count(2)
    (first, pid), _ = cluster.living("pool")
    ill = page.locator("tbody tr[data-replica]", has=page.locator(f'code[title="{first}"]'))
    pool = next(one for one in cluster.process.children("pool") if one.pid == pid)
    frozen = time.monotonic()
    pool.send_signal(signal.SIGSTOP)
    try:
        # Red, or gone with its process, which the other has reaped.
        expect(ill.locator(".badge-good")).to_have_count(0, timeout=1000 * RED_SECONDS)
        expect(rows.locator(".badge-good")).to_have_count(1)
        assert recovered(working, frozen)
        operate("processes")
        expect(page.locator(f'tr[data-ended="{first}"] .badge-bad')).to_be_visible()
    finally:
        pool.send_signal(signal.SIGCONT)
    operate("replicas")
    expect(rows.locator(".badge-good")).to_have_count(2)
    assert [tenant.account.failed for tenant in working] == [[], []]


def test_a_killed_api_is_told_dead_and_another_takes_its_place(cluster: Cluster, operate, tenants) -> None:
    working, _, _ = tenants
    page = operate("processes")
    living = page.locator("[aria-labelledby=apis] tr[data-process]", has=page.locator(".badge-good"))
    expect(living).to_have_count(2)
    api = cluster.process.children("api")[0]
    ((gone,),) = cluster.process.query("SELECT id FROM worker_processes WHERE kind = 'api' AND pid = %s", api.pid)
    killed = time.monotonic()
    cluster.process.kill_child(api)
    cluster.until(
        lambda: cluster.process.query("SELECT 1 FROM ended_processes WHERE id = %s", gone) != [], "the API is reaped"
    )
    # The page's own connection may have been to the API that is gone.
    operate("processes")
    expect(page.locator(f'tr[data-ended="{gone}"] .badge-bad')).to_be_visible()
    expect(page.locator(f'tr[data-process="{gone}"]')).to_have_count(0)
    expect(living).to_have_count(2)
    assert recovered(working, killed)


def audited(cluster: Cluster, action: str, resource: str) -> list[tuple[object, ...]]:
    """Return door and reason of the entries of an action on something, the latest first."""
    query = "SELECT door, after->>'reason' FROM audit_entries WHERE action = %s AND resource_id = %s ORDER BY id DESC"
    return cluster.process.query(query, action, resource)


def press(place: Page | Locator, button: str, reason: str) -> None:
    place.get_by_label("Reason").fill(reason)
    place.get_by_role("button", name=button, exact=True).click()


def test_a_run_is_moved_and_a_trainer_drained_by_buttons_while_both_tenants_work(
    cluster: Cluster, operate, tenants
) -> None:
    working, cats, _ = tenants
    run = run_of(cluster, cats)
    home, _ = trainer_of(cluster, cats)
    other = next(str(one) for one, _ in cluster.living("trainer") if one != home)
    page = operate(f"runs/{run}")
    facts, history = page.locator("dl.facts"), page.locator("[aria-labelledby=history] tbody tr")
    expect(facts).to_contain_text(home)
    page.get_by_label("Trainer; empty: any").fill(other)
    moved = time.monotonic()
    press(page, "Move", "room")
    expect(facts).to_contain_text(other)
    expect(history.filter(has_text="moved")).not_to_have_count(0)
    assert recovered(working, moved)
    assert audited(cluster, "run_move", run)[0] == ("ui", "room")
    page = operate("processes")
    row = page.locator(f'tr[data-process="{other}"]')
    drained = time.monotonic()
    press(page.locator(f'form[action="/ops/processes/{other}/drain"]'), "Drain", "new driver")
    expect(row).to_contain_text("drained")
    expect(row).to_contain_text("new driver")
    expect(row.locator(f'a[href="/ops/runs?trainer={other}"]')).to_have_text("0")
    assert recovered(working, drained)
    assert audited(cluster, "trainer_drain", other) == [("ui", "new driver")]
    page.locator(f'form[action="/ops/processes/{other}/work"]').get_by_role("button").click()
    expect(row.locator(".badge-good")).to_have_text("works")


def test_a_replica_is_drained_told_to_sleep_and_set_to_work_by_buttons_and_no_sample_fails(
    cluster: Cluster, operate, tenants
) -> None:
    working, _, _ = tenants
    page = operate("replicas")
    row, other = (page.locator(f'tr[data-replica^="{pool}/"]') for pool in ("pool-0", "pool-1"))
    name = row.get_attribute("data-replica")
    began = time.monotonic()
    for button, state, reason in (("Drain", "draining", "new driver"), ("Sleep", "drained, cannot sleep", "night")):
        page.get_by_label("Replica", exact=True).fill(name)
        press(page, button, reason)
        expect(row.locator(".badge-warn")).to_have_text(state)
        expect(row).to_contain_text(reason)
        stands = cluster.process.query("SELECT wanted, reason FROM ordered_replicas WHERE replica = %s", name)
        assert stands == [(button.lower(), reason)]
        assert audited(cluster, "replica_direct", name)[0] == ("ui", reason)
        expect(other.locator(".badge-good")).to_have_count(1)
        assert recovered(working, began)
    page.get_by_label("Replica", exact=True).fill(name)
    page.get_by_role("button", name="Work", exact=True).click()
    expect(row.locator(".badge-good")).to_have_text("works")
    assert cluster.process.query("SELECT 1 FROM ordered_replicas WHERE replica = %s", name) == []
    assert len(audited(cluster, "replica_direct", name)) == 3
    assert recovered(working, time.monotonic())
    assert [tenant.account.failed for tenant in working] == [[], []]
