"""A run's page without scripts: no empty plot and no control that does nothing, but its numbers in tables."""

import re

from playwright.sync_api import Page, expect

from tests.ui.stepping import stepping
from tests.ui.test_metrics import add_metrics

NOTICE = re.compile("Curves need scripts")
SCRIPTED = ":is(.plot, #curve select, #curve input, #curve button, .readout):visible"


def seen(page: Page) -> tuple[int, bool, bool]:
    """Tell how much that takes scripts is seen, and whether the hint for the mouse and the notice are."""
    hint = page.get_by_text("Drag over the curve").is_visible()
    return page.locator(SCRIPTED).count(), hint, page.get_by_text(NOTICE).is_visible()


def test_a_run_without_scripts_has_tables_and_nothing_that_takes_a_script(browse, ui_service) -> None:
    plain, page = browse(ui_service.cats, java_script_enabled=False), browse(ui_service.cats)
    with stepping(ui_service.url, ui_service.cats.key) as client:
        for one in (plain, page):
            one.goto(f"/ui/runs/{client.run}")
        expect(plain.get_by_text("No optimizer step yet")).to_be_visible()
        assert seen(plain) == (0, False, True)
        client.step(2)
        add_metrics(ui_service.url, ui_service.cats.key, client.run, {7: {"reward": 0.5}})
        for one in (plain, page):
            one.goto(f"/ui/runs/{client.run}")
            expect(one.locator("#points tbody tr")).to_have_count(2)
            expect(one.locator('[data-series="metric:reward"]')).to_contain_text("0.5")
        assert seen(plain) == (0, False, True)
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        scripted, hint, notice = seen(page)
        assert (scripted > 10, hint, notice) == (True, True, False)
        notice_box, table = plain.get_by_text(NOTICE).bounding_box(), plain.locator("#points").bounding_box()
        assert notice_box is not None
        assert table is not None
        assert notice_box["y"] < min(table["y"], 400)
