"""A page that nobody sees asks for nothing and has no stream; seen again, it is up to date at once."""

from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from tests.ui.browser import SECONDS
from tests.ui.stepping import stepping
from tests.ui.test_playground import LONG, drawn, fill, pane, press
from tests.ui.test_run_curve import expect_points

HIDE = """() => {
  Object.defineProperty(document, "hidden", { value: true, configurable: true });
  Object.defineProperty(document, "visibilityState", { value: "hidden", configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
SHOW = """() => {
  delete document.hidden;
  delete document.visibilityState;
  document.dispatchEvent(new Event("visibilitychange"));
}"""
FOLLOWS = {
    "/ui": "/ui/parts/overview",
    "/ui/queue": "/ui/queue/table",
    "/ui/runs": "/ui/runs/live",
    "/ops/overview": "/ops/overview/now",
}
"""Pages, and what each asks for again and again."""


def other_polls(beside: Page) -> None:
    """Wait until a page that is seen has asked anew: what another page has asked for before that is answered."""
    for _ in range(2):
        with beside.expect_response("**/ui/queue/table*"):
            pass


def check_hidden(page: Page, path: str, beside: Page) -> None:
    """Assert that the open page asks while it is seen, and not while it is hidden for a minute; and at once when seen again."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if path in request.url else None)
    with page.expect_response(f"**{path}*"):
        page.clock.run_for(6000)
    page.evaluate(HIDE)
    other_polls(beside)
    before = len(asked)
    page.clock.run_for(60_000)
    other_polls(beside)
    assert len(asked) == before
    page.clock.pause_at(page.evaluate("Date.now() / 1000") + 60)
    with page.expect_request(f"**{path}*"):
        page.evaluate(SHOW)


@pytest.mark.parametrize("place", FOLLOWS)
def test_a_hidden_page_asks_for_nothing_and_at_once_when_it_is_seen_again(browse, operate, ui_service, place) -> None:
    with stepping(ui_service.url, ui_service.cats.key):
        page, beside = operate() if place.startswith("/ops") else browse(ui_service.cats), browse(ui_service.dogs)
        beside.goto("/ui/queue")
        page.clock.install()
        page.goto(place)
        check_hidden(page, FOLLOWS[place], beside)


def test_a_hidden_run_has_no_stream_and_is_up_to_date_when_it_is_seen_again(browse, ui_service) -> None:
    with (
        stepping(ui_service.url, ui_service.cats.key) as client,
        stepping(ui_service.url, ui_service.dogs.key) as other,
    ):
        page, beside = browse(ui_service.cats), browse(ui_service.dogs)
        for one, run in ((page, client.run), (beside, other.run)):
            one.goto(f"/ui/runs/{run}")
            expect(one.locator("#curve")).to_have_attribute("data-live", "open")
        with page.expect_event("requestfailed", lambda request: "/events?" in request.url, timeout=SECONDS * 1000):
            page.evaluate(HIDE)
        expect(page.locator("#curve")).to_have_attribute("data-live", "closed")
        client.step(2)
        other.step()
        expect_points(beside, 1)
        expect(page.locator("#curve")).to_have_attribute("data-points", "0")
        page.evaluate(SHOW)
        expect_points(page, 2)
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")


def test_a_hidden_playground_does_not_ask_how_its_gate_stands(browse, ui_service, speakers, cat) -> None:
    page, state = browse(ui_service.cats), f"**/ui/adapters/{quote(cat.run, safe='')}/state"
    page.clock.install()
    fill(page, cat.run, tokens=LONG)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/state") else None)
    press(page)
    drawn(page, 5)
    cat.gate("pause", mode="keep", timeout_seconds=0)
    expect(pane(page)).to_have_attribute("data-state", "paused")
    page.evaluate(HIDE)
    before = len(asked)
    page.clock.run_for(60_000)
    assert len(asked) == before
    with page.expect_request(state):
        page.evaluate(SHOW)
    cat.gate("resume")
    expect(pane(page)).to_have_attribute("data-state", "done")
