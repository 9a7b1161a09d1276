"""The overview follows what the SDK does: a step and a bar are on the page within two seconds, and another tenant's are not."""

from contextlib import closing
from typing import Any

import httpx
from playwright.sync_api import Page, expect

from api.dashboard.rendering import count
from api.dashboard.waiting_words import waiting_words
from testing.operator_command import weft
from tests.e2e.conftest import BASE_NAME, make_key, make_tenant
from tests.e2e.raw_client import RawClient, pass_message
from tests.ui.conftest import UiService, UiTenant
from tests.ui.stepping import stepping
from tests.ui.still_queue import StillQueue
from tests.ui.stored import write_rows


def test_a_bar_and_a_runs_steps_follow_the_sdk_within_two_seconds(browse, axe, ui_service) -> None:
    """The page's clock is the test's: within one second of it the page asks, and the answer has the step and the checkpoint."""
    page, other = browse(ui_service.cats), browse(ui_service.dogs)
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step()
        page.clock.install()
        page.goto("/ui")
        row = page.locator(f'tr[data-run="{client.run}"]')
        expect(row.locator("td.number").first).to_have_text("1")
        bar = page.locator('[data-limit="checkpoints"]')
        expect(page.locator("[data-strip]")).to_contain_text(f"serves {BASE_NAME}")
        before = int(bar.get_attribute("data-used") or 0)
        client.step()
        client.save()
        with page.expect_response("**/ui/parts/overview"):
            page.clock.run_for(1000)
        expect(row.locator("td.number").first).to_have_text("2")
        expect(bar).to_have_attribute("data-used", str(before + 1))
        axe(page)
        expect(other.locator(f'tr[data-run="{client.run}"]')).to_have_count(0)


def test_the_bars_are_the_apis_standing(browse, ui_service) -> None:
    page = browse(ui_service.dogs)
    with (
        stepping(ui_service.url, ui_service.dogs.key) as client,
        stepping(ui_service.url, ui_service.cats.key) as other,
    ):
        client.step()
        client.save()
        other.step()
        page.goto("/ui")
        shown = page.locator("[data-limit]").evaluate_all(
            "all => all.map((one) => [one.dataset.limit, [Number(one.dataset.used), Number(one.dataset.value)]])"
        )
        answer = httpx.get(
            f"{ui_service.url}/api/weft/v1/usage/standing", headers={"X-API-Key": ui_service.dogs.key}, timeout=40
        )
        told = {one["name"]: [one["used"], one["value"]] for one in answer.raise_for_status().json()["limits"]}
        bars = dict(shown)
        assert bars == {name: one for name, one in told.items() if one[0] is not None}
        assert bars["open_runs"][0] >= 1


def told(service: UiService, tenant: UiTenant, route: str, **query: str) -> Any:
    """Return the API's answer."""
    address = f"{service.url}/api/weft/v1/{route}"
    answer = httpx.get(address, params=query, headers={"X-API-Key": tenant.key}, timeout=40)
    return answer.raise_for_status().json()


def budgets_of(page: Page) -> list[list[str]]:
    """Return period, spent tokens and text of each budget that the page tells."""
    shown: list[list[str]] = page.locator("[data-budget]").evaluate_all(
        "all => all.map((one) => [one.dataset.budget, one.dataset.spent, "
        "one.querySelector('.meter-value').firstChild.textContent.trim()])"
    )
    return shown


def test_what_is_spent_of_a_budget_is_the_apis_and_goes_on(browse, axe, ui_service) -> None:
    make_tenant(ui_service.data, "spenders")
    key = make_key(ui_service.data, "spenders", role="admin")
    spenders = UiTenant("spenders", ui_service.data, key, {"admin": key})
    weft(ui_service.data, "tenant", "budget", "spenders", "--month", "5000", "--total", "1000000")
    page, beside = browse(spenders), browse(ui_service.dogs)
    with closing(RawClient(ui_service.url, key)) as client:
        run = client.model(BASE_NAME)
        for seq_id, length in ((1, 1200), (2, 34)):
            before = {one: spent for one, spent, _ in budgets_of(page)}
            client.result(client.passes(pass_message(run, seq_id, [seq_id] * length)))
            expect(page.locator('[data-budget="month"]')).not_to_have_attribute("data-spent", before["month"])
            standing = told(ui_service, spenders, "usage/standing")
            assert sum(one["spent"] for one in standing["budgets"]) > 0
            for budget in standing["budgets"]:
                line = page.locator(f'[data-budget="{budget["period"]}"]')
                expect(line).to_have_attribute("data-spent", str(budget["spent"]))
                text = f"{count(budget['spent'])} of {count(budget['amount'])} tokens"
                expect(line.locator(".meter-value")).to_contain_text(text)
        assert {one: spent for one, spent, _ in budgets_of(page)} == {"month": "1234", "total": "1234"}
        axe(page)
    expect(beside.locator("[data-budget]")).to_have_count(0)


def check_waiting(page: Page, service: UiService, tenant: UiTenant) -> list[str]:
    """Assert that the box of waiting work comes to tell what the API tells of the oldest; return their ids."""
    oldest = told(service, tenant, "operations", limit="6")["operations"]
    rows = page.locator("[aria-labelledby=waiting] tbody tr")
    expect(rows).to_have_count(len(oldest))
    for place, operation in enumerate(oldest):
        expect(rows.nth(place)).to_have_attribute("data-key", operation["request_id"])
        cells = rows.nth(place).locator("td")
        expect(cells.first).to_contain_text(operation["kind"])
        expect(cells.last).to_have_text(waiting_words(operation["wait"]["reason"]))
    return [operation["request_id"] for operation in oldest]


def test_the_waiting_box_has_the_oldest_operations_with_their_reasons_until_they_end(
    browse, axe, ui_service, still: StillQueue
) -> None:
    page, beside = browse(ui_service.dogs), browse(ui_service.cats)
    mine, theirs = (
        check_waiting(one, ui_service, tenant) for one, tenant in ((page, ui_service.dogs), (beside, ui_service.cats))
    )
    assert mine[:2] == still.passes["dogs"][:2]
    assert len(mine) == 6
    assert not set(mine) & set(theirs)
    axe(page)
    write_rows(ui_service.data, still.end_passes)
    later = check_waiting(page, ui_service, ui_service.dogs)
    panel = page.locator("[aria-labelledby=waiting]")
    height = panel.evaluate("(one) => one.offsetHeight")
    assert later[0] == still.passes["dogs"][2]
    assert check_waiting(beside, ui_service, ui_service.cats) == theirs
    write_rows(ui_service.data, still.empty)
    expect(panel).to_contain_text("Nothing waits")
    assert panel.evaluate("(one) => one.offsetHeight") == height


def test_panels_beside_each_other_leave_their_tables_room(browse, axe, ui_service) -> None:
    page, beside = browse(ui_service.cats), browse(ui_service.dogs, color_scheme="dark")
    with closing(RawClient(ui_service.url, ui_service.cats.key)) as client:
        run = client.model(BASE_NAME)
        client.result(client.post("/save_weights", model_id=run, path="brief", seq_id=1, ttl_seconds=600))
        failing = client.post("/load_weights", model_id=run, path=f"tinker://{run}/weights/none", seq_id=2)
        client.result(failing)
        page.goto("/ui")
        for name in ("waiting", "failed", "ending"):
            panel = page.locator(f"[aria-labelledby={name}]")
            expect(panel).to_be_visible()
            assert panel.evaluate("(one) => one.clientWidth") >= 440
            wraps = panel.locator(".table-wrap")
            assert wraps.evaluate_all("all => all.every((one) => one.scrollWidth <= one.clientWidth)")
        widths = page.locator("[aria-labelledby=failed] td.long").evaluate_all(
            "all => all.map((one) => one.clientWidth)"
        )
        assert min(widths) >= 150
        axe(page)
    for narrow in (400, 1280):
        beside.set_viewport_size({"width": narrow, "height": 900})
        beside.goto("/ui")
        assert beside.evaluate("document.documentElement.scrollWidth") <= narrow
        axe(beside)
    expect(beside.locator(f'[aria-labelledby=ending] [data-ending*="{run}"]')).to_have_count(0)
