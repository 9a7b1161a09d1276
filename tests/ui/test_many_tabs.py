"""Many tabs of one browser: a browser has six connections to a server, of which streams may not take the last."""

from playwright.sync_api import expect

from api.dashboard.events import MOST_STREAMS
from tests.ui.stepping import stepping
from tests.ui.test_run_curve import expect_points

TABS = 7
CONNECTIONS = 6
"""Connections that a browser opens to one server over HTTP/1.1."""
PATIENCE_MS = 2500
"""Time after which a page that does not reach the service has told so."""


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
        last.goto("/ui/projects")
        last.get_by_label("Name").fill("seventh")
        last.get_by_role("button", name="Make the project").click()
        expect(last.get_by_role("cell", name="seventh")).to_be_visible()
        client.step()
        other.step()
        for page in (tabs[-2], beside):
            expect(page.locator("#curve")).to_have_attribute("data-points", "1")
        expect(beside.locator("#curve")).to_have_attribute("data-live", "open")


def test_a_page_whose_stream_another_took_says_so_calmly_and_lives_on(browse, axe, ui_service) -> None:
    with (
        stepping(ui_service.url, ui_service.cats.key) as client,
        stepping(ui_service.url, ui_service.dogs.key) as other,
    ):
        first, beside = browse(ui_service.cats), browse(ui_service.dogs)
        tabs = [first, *(first.context.new_page() for _ in range(MOST_STREAMS))]
        places = [(page, client.run) for page in tabs]
        for page, run in [(beside, other.run), *places]:
            page.goto(f"/ui/runs/{run}")
            expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        first.wait_for_timeout(PATIENCE_MS)
        for page in (*tabs, beside):
            assert page.get_by_text("The service does not answer").is_hidden()
        expect(first.locator("#curve")).to_have_attribute("data-live", "looks")
        expect(first.get_by_text("Another page took this one's live stream")).to_be_visible()
        for page in (*tabs[1:], beside):
            expect(page.get_by_text("Another page took this one's live stream")).to_be_hidden()
        for number in (1, 2):
            client.step()
            other.step()
            for page in (*tabs, beside):
                expect_points(page, number)
        client.save()
        expect(first.locator('#marks tr[data-kind="publication"]')).to_have_count(1)
        expect(first.locator("#points tbody tr")).to_have_count(2)
        axe(first)
        assert [one.request.get(f"/ui/runs/{client.run}/news").status for one in (first, beside)] == [200, 404]
        # Turned to again, the page has its stream back, and the page that is now the oldest has none.
        first.evaluate("() => dispatchEvent(new Event('focus'))")
        expect(first.locator("#curve")).to_have_attribute("data-live", "open")
        expect(first.get_by_text("Another page took this one's live stream")).to_be_hidden()
        expect(tabs[1].locator("#curve")).to_have_attribute("data-live", "looks")
        client.step()
        for page in tabs:
            expect_points(page, 3)
        expect(first.locator("#curve")).to_have_attribute("data-live", "open")
        expect(beside.locator("#curve")).to_have_attribute("data-live", "open")
