"""Rows, figures and estimates of a live page are those of a page that is loaded afterwards."""

import random
import re
from contextlib import closing
from datetime import timedelta

from playwright.sync_api import Page, Route, expect

from api.dashboard.rendering import count, duration, measured
from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient, pass_message
from tests.ui.browser import SECONDS
from tests.ui.stepping import stepping
from tests.ui.test_run_curve import expect_points, lengthen

LONG = 1200
ETA = 130.4
TIES = [1.0625, 10.125, 1234.5, 1235.5, 2.25, 12.5, 0.03125, 9999.5, 62.5]
"""Numbers half-way between two that can be written, which Python rounds to the even one."""
WRITTEN = """
async (given) => {
  const numbers = await import("/ui/static/numbers.js");
  return Object.entries(given).map(([name, values]) => values.map((value) => numbers[name](value)));
}
"""


def take_step(client: RawClient, run: str, seq_id: int) -> None:
    """Take a step whose learning rate and number of tokens are short in one way of writing alone."""
    client.passes(pass_message(run, seq_id, [5, 6, 7] * 4))
    client.result(client.step(run, seq_id + 1, learning_rate=3e-4))


def figures(page: Page) -> list[str]:
    """Return the figures above the curve with their names."""
    return page.locator(".figures li").all_inner_texts()


def rows(page: Page) -> list[str]:
    """Return the table of points with its caption."""
    return [page.locator("#points caption").inner_text(), *page.locator("#points tbody tr").all_inner_texts()]


def small(page: Page) -> list[str]:
    """Return the last values of the small plots that are in sight."""
    shown = page.locator('.small-plot[data-series="tokens"], .small-plot[data-series="learning_rate"]')
    return shown.locator("figcaption").all_inner_texts()


def test_numbers_of_scripts_are_written_as_those_of_templates(browse, ui_service) -> None:
    page = browse(ui_service.cats)
    page.goto("/ui/runs")
    dice = random.Random(7)
    sizes = [dice.uniform(1, 10) * 10.0**power for power in range(-9, 12) for _ in range(30)]
    numbers = [*sizes, *(-one for one in sizes[::7]), *TIES, 0.0, 3e-4, 1e-4, 0.99996, 999.96, 131_072.0, 1e7, None]
    whole = [0, 7, 999, 1000, 1055, 131_072, 10_000_000, 123_456_789_012]
    seconds = [0.0, 0.25, 0.9999, 1.0, 9.94, 9.96, 12.5, 59.6, 60, 130.4, 3600, 3661, 86_400, 200_000, *sizes[::5]]
    given = {"measured": numbers, "count": [*whole, None], "duration": [*seconds, None]}
    told = page.evaluate(WRITTEN, given)
    assert told[0] == [measured(one) for one in numbers]
    assert told[1] == [count(one) for one in (*whole, None)]
    assert told[2] == [duration(one) for one in (*seconds, None)]


def test_a_live_row_and_the_figures_are_those_of_a_page_that_is_loaded_then(browse, ui_service) -> None:
    page, beside = browse(ui_service.cats), browse(ui_service.dogs)
    with (
        closing(RawClient(ui_service.url, ui_service.cats.key)) as client,
        closing(RawClient(ui_service.url, ui_service.dogs.key)) as other,
    ):
        run, theirs = client.model(BASE_NAME), other.model(BASE_NAME)
        beside.goto(f"/ui/runs/{theirs}")
        expect(beside.locator("#curve")).to_have_attribute("data-live", "open")
        take_step(client, run, 1)
        lengthen(ui_service.data, run, LONG)
        page.goto(f"/ui/runs/{run}")
        expect_points(page, LONG)
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        page.locator("#metrics").scroll_into_view_if_needed()
        for number in (1, 2):
            take_step(client, run, 1 + 2 * number)
            take_step(other, theirs, 2 * number - 1)
            expect_points(page, LONG + number)
            expect_points(beside, number)
            for one, id in ((page, run), (beside, theirs)):
                fresh = one.context.new_page()
                fresh.goto(f"/ui/runs/{id}")
                assert rows(one) == rows(fresh)
                assert figures(one) == figures(fresh)
                fresh.close()
        page.locator("#metrics").scroll_into_view_if_needed()
        expect(page.locator('.small-plot[data-series="tokens"]')).to_have_attribute("data-points", str(LONG + 2))
        live = small(page)
        page.reload()
        assert live == small(page)


def test_the_speed_counts_the_last_steps_whether_they_were_loaded_or_came(browse, ui_service) -> None:
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step(3)
        page = browse(ui_service.cats)
        page.goto(f"/ui/runs/{client.run}")
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        fresh = page.context.new_page()
        for number in (4, 5, 6):
            page.wait_for_timeout(1100)
            client.step()
            expect_points(page, number)
            fresh.goto(f"/ui/runs/{client.run}")
            assert figures(page) == figures(fresh)


def test_a_step_between_the_page_and_its_stream_is_in_the_table(browse, ui_service) -> None:
    page = browse(ui_service.cats)
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step(2)

        def step_first(route: Route) -> None:
            client.step()
            route.continue_()

        page.route("**/curve/now?series=mean_loss", step_first, times=1)
        page.goto(f"/ui/runs/{client.run}")
        expect_points(page, 3)
        expect(page.locator("#points tbody tr td:first-child").first).to_have_text("3", timeout=SECONDS * 1000)
        expect(page.locator("#points tbody tr")).to_have_count(3)


def test_a_live_estimate_is_told_as_a_loaded_one(browse, ui_service) -> None:
    """The stream is the test's: an estimate of minutes takes a queue of as long."""
    page = browse(ui_service.cats)
    waiting = '{"reason": "turn", "words": "waits its turn", "text": "t", "since": null, '
    waiting += f'"ahead": {{"bound_passes": 1200, "eta_seconds": {ETA}}}}}'
    body = f'event: standing\ndata: {{"state": "ready", "end_reason": null, "waiting": {waiting}}}\n\n'
    stream = f"retry: 600000\n\n{body}"
    page.route("**/events?*", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    with closing(RawClient(ui_service.url, ui_service.cats.key)) as client:
        page.goto(f"/ui/runs/{client.model(BASE_NAME)}")
        estimate = page.locator("#waiting [data-field=eta]")
        expect(estimate).to_have_text(f"about {duration(timedelta(seconds=ETA))}")
        expect(page.locator("#waiting [data-field=bound]")).to_have_text(re.compile(rf"^{count(1200)} passes$"))
