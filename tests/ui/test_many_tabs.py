"""Many tabs of one browser: a browser has six connections to a server, of which streams may not take the last."""

import time

from playwright.sync_api import expect

from api.dashboard.events import MOST_STREAMS
from tests.ui.stepping import stepping

TABS = 7
CONNECTIONS = 6
"""Connections that a browser opens to one server over HTTP/1.1."""
SECONDS = 10.0
"""Longest time of a form, on a machine with other work: without a free connection it never ends."""


def test_seven_pages_with_streams_leave_a_form_its_connection(browse, watched, ui_service) -> None:
    """A headless browser takes every tab for a seen one, so that each has its stream."""
    assert MOST_STREAMS < CONNECTIONS
    with (
        stepping(ui_service.url, ui_service.cats.key) as client,
        stepping(ui_service.url, ui_service.dogs.key) as other,
    ):
        first, beside = browse(ui_service.cats), browse(ui_service.dogs)
        beside.goto(f"/ui/runs/{other.run}")
        expect(beside.locator("#curve")).to_have_attribute("data-live", "open")
        tabs = [first, *(first.context.new_page() for _ in range(TABS - 1))]
        for page in tabs:
            page.goto(f"/ui/runs/{client.run}")
            expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        last = tabs[-1]
        assert last.evaluate("document.hidden") is False
        live = [page.locator("#curve").get_attribute("data-live") for page in tabs]
        assert live[-MOST_STREAMS:] == ["open"] * MOST_STREAMS
        began = time.monotonic()
        last.goto("/ui/projects")
        last.get_by_label("Name").fill("seventh")
        last.get_by_role("button", name="Make the project").click()
        expect(last.get_by_role("cell", name="seventh")).to_be_visible()
        assert time.monotonic() - began < SECONDS
        client.step()
        other.step()
        for page in (tabs[-2], beside):
            expect(page.locator("#curve")).to_have_attribute("data-points", "1")
        expect(beside.locator("#curve")).to_have_attribute("data-live", "open")
