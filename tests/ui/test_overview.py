"""The overview follows what the SDK does: a step and a bar are on the page within two seconds, and another tenant's are not."""

import httpx
from playwright.sync_api import expect

from tests.e2e.conftest import BASE_NAME
from tests.ui.stepping import stepping


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
