"""The overview follows what the SDK does: a step and a bar are on the page within two seconds, and another tenant's are not."""

from playwright.sync_api import expect

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
        before = int(bar.get_attribute("data-used") or 0)
        client.step()
        client.save()
        with page.expect_response("**/ui/parts/overview"):
            page.clock.run_for(1000)
        expect(row.locator("td.number").first).to_have_text("2")
        expect(bar).to_have_attribute("data-used", str(before + 1))
        axe(page)
        expect(other.locator(f'tr[data-run="{client.run}"]')).to_have_count(0)
