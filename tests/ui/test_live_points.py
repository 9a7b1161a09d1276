"""A run's live page: points that come while a curve is read are kept, and a hidden page has no stream."""

from playwright.sync_api import Page, Route, expect

from tests.ui.browser import SECONDS
from tests.ui.stepping import stepping
from tests.ui.test_run_curve import expect_points, lengthen


class HeldAnswers:
    """Curve answers that the service has given and the page has not received yet."""

    def __init__(self) -> None:
        self.is_holding = False
        self.held: list[tuple[Route, bytes]] = []

    def handle(self, route: Route) -> None:
        """Let the service answer, and hold the answer back while holding is on."""
        answer = route.fetch()
        if self.is_holding:
            self.held.append((route, answer.body()))
        else:
            route.fulfill(response=answer)

    def release(self) -> None:
        """Hand on what is held."""
        self.is_holding = False
        for route, body in self.held:
            route.fulfill(body=body, content_type="application/json")


def wait_until_held(page: Page, answers: HeldAnswers) -> None:
    """Wait until an answer is held back. Raises ``AssertionError``."""
    for _ in range(int(SECONDS) * 10):
        if answers.held:
            return
        page.wait_for_timeout(100)
    raise AssertionError("the page asked for no curve")


def test_points_that_come_while_another_series_is_read_are_drawn(browse, ui_service) -> None:
    page, answers = browse(ui_service.cats), HeldAnswers()
    page.route("**/curve?series=tokens", answers.handle)
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step(2)
        page.goto(f"/ui/runs/{client.run}")
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        answers.is_holding = True
        page.locator("#series").select_option("tokens")
        wait_until_held(page, answers)
        client.step()
        expect_points(page, 3)
        answers.release()
        expect(page.locator("#curve")).to_have_attribute("data-other-step", "3", timeout=SECONDS * 1000)


def test_points_that_come_while_a_long_curve_is_read_again_are_drawn(browse, ui_service) -> None:
    """The first answer is made as long as a page that was open for hours, so that the next point has it read again."""
    page, answers = browse(ui_service.cats), HeldAnswers()
    page.route("**/curve/now?series=mean_loss", answers.handle)
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step()
        lengthen(ui_service.data, client.run, 4000)
        steps = list(range(1, 4001))
        long = {"step": steps, "value": [1.0] * 4000, "mean": [1.0] * 4000, "count": [1] * 4000, "at": steps}
        long |= {"width": 1, "points": 4000, "broken": [], "broken_points": 0, "last_step": 4000}
        page.route("**/curve/now?series=mean_loss", lambda route: route.fulfill(json=long), times=1)
        page.goto(f"/ui/runs/{client.run}")
        expect_points(page, 4000)
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        answers.is_holding = True
        client.step()
        wait_until_held(page, answers)
        client.step(2)
        expect_points(page, 4003)
        assert len(answers.held) == 1
        answers.release()
        expect(page.locator("#curve")).not_to_have_attribute("data-shown", "4003", timeout=SECONDS * 1000)
        expect_points(page, 4003)
        expect(page.locator("#curve")).to_have_attribute("data-last-step", "4003")


def test_a_page_that_is_hidden_after_a_refused_stream_opens_no_other(browse, ui_service, watched) -> None:
    page = browse(ui_service.cats)
    watched[-1].expected += ["503", "Failed to load resource"]
    asked: list[str] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(status=503)

    page.route("**/events?*", refuse)
    with stepping(ui_service.url, ui_service.cats.key) as client:
        page.clock.install()
        page.goto(f"/ui/runs/{client.run}")
        expect(page.locator("#curve")).to_have_attribute("data-live", "closed", timeout=SECONDS * 1000)
        page.evaluate(
            "() => { Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
            " document.dispatchEvent(new Event('visibilitychange')); }"
        )
        before = len(asked)
        page.clock.run_for(60_000)
        assert len(asked) == before
        with page.expect_request("**/events?*", timeout=SECONDS * 1000):
            page.evaluate("() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); }")
            page.clock.run_for(60_000)
