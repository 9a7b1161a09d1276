"""The list of runs in a browser: thousands by pages, filters in the address, states that go on, runs compared."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from bench.dashboard.filling import fill
from tests.e2e.conftest import BASE_NAME, make_key, make_tenant
from tests.ui.conftest import UiService, UiTenant
from tests.ui.stepping import stepping
from tests.ui.stored import write_rows
from tests.ui.test_metrics import add_metrics

RUNS = 10_000


@pytest.fixture(scope="module")
def many(ui_service: UiService) -> UiTenant:
    """A tenant with ten thousand runs."""
    make_tenant(ui_service.data, "many")
    key = make_key(ui_service.data, "many", role="admin")
    write_rows(ui_service.data, lambda database: fill(database, "many", BASE_NAME, RUNS))
    return UiTenant("many", ui_service.data, key, {"admin": key})


def seeds(page: Page) -> list[str]:
    """Return the ids of the rows, in order."""
    return [one.get_attribute("data-run") or "" for one in page.locator("tr[data-run]").all()]


def test_ten_thousand_runs_are_read_by_pages_and_the_back_button_works(browse, axe, many: UiTenant) -> None:
    page = browse(many)
    page.goto("/ui/runs")
    first = seeds(page)
    assert len(first) == 50
    expect(page.locator("tr[data-run] .spark path").first).to_have_attribute("d", re.compile(r"^M.*L"))
    axe(page)
    page.get_by_role("link", name="Older").click()
    page.wait_for_url(re.compile("cursor="))
    second = seeds(page)
    assert len(second) == 50
    assert not set(first) & set(second)
    page.go_back()
    assert seeds(page) == first
    page.get_by_label("Metadata", exact=True).fill("sweep=7")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url(re.compile("metadata=sweep%3D7"))
    assert len(seeds(page)) == 50
    assert page.locator("tr[data-run]", has_text="sweep=7").count() == 50
    page.get_by_label("State").select_option("failed")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_text("No run matches")).to_be_visible()
    page.go_back()
    assert len(seeds(page)) == 50


def test_the_list_works_without_scripts_and_shows_nobody_elses(browse, many: UiTenant, ui_service: UiService) -> None:
    page = browse(many, java_script_enabled=False)
    page.goto("/ui/runs?text=gsm8k")
    own = seeds(page)
    assert len(own) == 50
    for number in (0, 1):
        page.locator("input[name=run]").nth(number).check()
    page.get_by_role("button", name="Compare chosen").click()
    expect(page.get_by_role("heading", name="Compare 2 runs")).to_be_visible()
    expect(page.locator("tr.differs", has_text="Seed")).to_be_visible()
    other = browse(ui_service.dogs)
    other.goto("/ui/runs?text=gsm8k")
    expect(other.get_by_text("No run matches")).to_be_visible()
    answer = other.request.get(f"/ui/runs/compare?run={own[0]}&run={own[1]}")
    assert answer.status == 404
    assert other.request.get("/ui/runs/compare?run=x").status == 400
    assert other.request.get("/ui/runs?state=nonsense").status == 400


def test_rows_go_on_while_the_page_is_open(browse, ui_service: UiService) -> None:
    page = browse(ui_service.dogs)
    with stepping(ui_service.url, ui_service.dogs.key) as client:
        page.goto("/ui/runs")
        row = page.locator(f'tr[data-run="{client.run}"]')
        expect(row.locator(".state")).to_have_text("ready")
        client.step(2)
        expect(row.locator('[data-field="steps"]')).to_have_text("2")
        expect(row.locator(".spark path")).to_have_attribute("d", re.compile("^M"))
        last = row.locator('[data-field="loss"]').inner_text()
        told = f"Mean loss of the last 2 steps; at the last: {last}"
        expect(row.get_by_role("img", name=told, exact=True)).to_be_visible()


def test_curves_are_drawn_over_each_other(browse, axe: Callable[[Page], None], many: UiTenant) -> None:
    page = browse(many, color_scheme="dark")
    page.goto("/ui/runs")
    chosen = seeds(page)[:4]
    page.goto("/ui/runs/compare?" + "&".join(f"run={one}" for one in chosen))
    expect(page.locator("#compare")).to_have_attribute("data-points", "40 40 40 40")
    expect(page.locator("#loss-plot canvas")).to_be_visible()
    for one in (page.locator(".legend li"), page.locator(".settings thead th:not(:first-child)")):
        expect(one).to_contain_text([re.compile(r"sweep=\d+")] * len(chosen))
    axe(page)


def test_runs_are_compared_by_any_metric_that_one_of_them_has(browse, watched, ui_service: UiService) -> None:
    url, key, page = ui_service.url, ui_service.dogs.key, browse(ui_service.dogs)
    with stepping(url, key) as one, stepping(url, key) as other:
        one.step()
        add_metrics(url, key, one.run, {3: {"reward": 0.5}, 4: {"reward": 0.75}})
        page.goto(f"/ui/runs/compare?run={one.run}&run={other.run}")
        expect(page.locator("#compare")).to_have_attribute("data-points", "1 0")
        page.get_by_label("Series").select_option("metric:reward")
        expect(page.locator("#compare")).to_have_attribute("data-series", "metric:reward")
        expect(page.locator("#compare")).to_have_attribute("data-points", "2 0")
        expect(page.locator(".legend [data-value]")).to_have_text(["0.75", "–"])
        # A session that has ended meanwhile is told by the next series that is asked for.
        watched[0].expected.append("401")
        page.context.request.post("/ui/logout", headers={"Sec-Fetch-Site": "same-origin"}, max_redirects=0)
        page.get_by_label("Series").select_option("mean_loss")
        expect(page).to_have_url(re.compile(r"/ui/login\?next="))


def test_a_tenant_without_runs_is_told_how_one_begins(browse, axe, ui_service: UiService) -> None:
    make_tenant(ui_service.data, "new")
    key = make_key(ui_service.data, "new", role="viewer")
    page = browse(UiTenant("new", ui_service.data, key, {"admin": key}))
    page.goto("/ui/runs")
    expect(page.get_by_text("create_lora_training_client")).to_be_visible()
    axe(page)
