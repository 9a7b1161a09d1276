"""A part of a page that is refused: what was there stays, one line tells why, and a session that has ended leads to the login."""

import re
from collections.abc import Callable
from contextlib import closing
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from playwright.sync_api import Page, Route, expect

from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient
from tests.ui.stepping import stepping

TOLD = {
    400: "That did not work: days is no number",
    403: "Not allowed: this needs the scope read",
    404: "Not here: no model 'x'",
    429: "Too many at once: 9 requests wait",
    500: "Something went wrong: weft itself failed here.",
    503: "Not now: the service stops",
}
"""Lines of the service itself, by the status of its answer."""
OLD = "What you see may be old"
PARTS = {"/ui/queue": "/ui/queue/table", "/ops/queue": "/ops/queue/now"}


def answering(status: int, body: str) -> Callable[[Route], None]:
    """Return what answers a request so."""
    return lambda route: route.fulfill(status=status, body=body, content_type="text/html; charset=utf-8")


def refused(page: Page, path: str, status: int, body: str) -> None:
    """Have the next answers to a part be that, and let a person's patience pass."""
    page.route(f"**{path}*", answering(status, body))
    with page.expect_response(f"**{path}*"):
        page.clock.run_for(2100)
    page.clock.run_for(4100)


def check_refusals(page: Page, place: str, axe) -> None:
    """Assert that each status leaves the part as it was, and is told once; and that the next good answer ends that."""
    path = PARTS[place]
    page.clock.install()
    page.goto(place)
    part, banner = page.locator(f'[hx-get^="{path}"]'), page.locator("#unreached")
    before = part.inner_html().strip()
    assert "Nothing waits" in before
    for status, line in TOLD.items():
        refused(page, path, status, f'<p class="notice" role="alert">{line} <code>code</code></p>')
        expect(banner).to_have_text(f"{line.rstrip('.')}. {OLD}; the page tries again by itself.")
        assert part.inner_html().strip() == before
        page.unroute(f"**{path}*")
        page.clock.run_for(2100)
        expect(banner).to_be_hidden()
    refused(page, path, 502, "<h1>Bad gateway</h1><p>of something between</p>")
    expect(banner).to_contain_text("The service does not answer.")
    assert part.inner_html().strip() == before
    axe(page)
    page.unroute(f"**{path}*")


def test_a_refused_part_keeps_its_content_and_is_told_in_one_line(browse, operate, axe, watched, ui_service) -> None:
    beside = browse(ui_service.dogs)
    beside.goto("/ui/queue")
    for opened, place in ((lambda: browse(ui_service.cats), "/ui/queue"), (operate, "/ops/queue")):
        page = opened()
        watched[-1].expected += ["Failed to load resource", "Response Status Error"]
        check_refusals(page, place, axe)
    expect(beside.locator("#unreached")).to_be_hidden()


@pytest.mark.parametrize("place", ["/ui/queue", "/ops/queue"])
def test_a_part_without_a_session_leads_to_the_login(browse, operate, watched, ui_service, place: str) -> None:
    page = operate() if place.startswith("/ops") else browse(ui_service.cats)
    watched[-1].expected += ["401", "htmx:"]
    page.goto(place)
    page.route(f"**{PARTS[place]}*", lambda route: route.fulfill(status=401))
    page.wait_for_url(re.compile(r"/(ui/login\?next=%2Fui%2Fqueue|ops/login)$"))


def leads_back_to(url: str) -> str | None:
    """Return the page that a login's address goes on to."""
    found = urlsplit(url)
    return parse_qs(found.query).get("next", [""])[0] if found.path == "/ui/login" else None


def test_a_session_that_ends_leads_to_the_login_and_from_there_back(browse, watched, ui_service) -> None:
    """A part, a script that asks again and a stream each follow the service."""
    with stepping(ui_service.url, ui_service.cats.key) as client:
        page, other, beside = browse(ui_service.cats), browse(ui_service.cats), browse(ui_service.dogs)
        watched[0].expected += ["401", "htmx:"]
        paths = ["/ui/queue", "/ui/runs?state=ready", f"/ui/runs/{client.run}?points=1"]
        tabs = [page, *(page.context.new_page() for _ in paths[1:])]
        for tab, path in zip(tabs, paths, strict=True):
            tab.goto(path)
        expect(tabs[-1].locator("#curve")).to_have_attribute("data-live", "open")
        beside.goto("/ui/queue")
        page.context.request.post("/ui/logout", headers={"Sec-Fetch-Site": "same-origin"}, max_redirects=0)
        for tab, path in zip(tabs, paths, strict=True):
            tab.wait_for_url(lambda url, path=path: leads_back_to(url) == path)
        page.get_by_label("API key").fill(ui_service.cats.key)
        page.get_by_role("button", name="Log in").click()
        expect(page).to_have_url(re.compile("/ui/queue$"))
        for one in (other, beside):
            one.reload()
            expect(one.get_by_role("navigation", name="Pages")).to_be_visible()


def test_a_page_that_follows_by_scripts_is_told_the_same(browse, watched, ui_service) -> None:
    """A list that asks again, and a stream, whose refusal another answer explains."""
    told = '<p class="notice">Not allowed: this needs the scope read <code>x</code></p>'
    with stepping(ui_service.url, ui_service.cats.key) as client:
        page, stream = browse(ui_service.cats), ["**/events?*", "**/curve/now?*&begin=0&end=1"]
        watched[0].expected += ["Failed to load resource"]
        for place, asked, status, body, line in (
            ("/ui/runs", ["**/runs/live*"], 403, told, "Not allowed: this needs the scope read."),
            (f"/ui/runs/{client.run}", stream, 403, told, "Not allowed: this needs the scope read."),
            (f"/ui/runs/{client.run}", stream, 503, "", "The service does not answer."),
        ):
            for one in asked:
                page.route(one, answering(status, body))
            page.goto(place)
            before = page.locator("h1").inner_text()
            expect(page.locator("#unreached")).to_contain_text(f"{line} {OLD}")
            expect(page.locator("h1")).to_have_text(before)
            for one in asked:
                page.unroute(one)
            expect(page.locator("#unreached")).to_be_hidden()


@pytest.mark.parametrize(
    ("asked", "root", "attribute", "value"),
    [
        ("**/curve/now?series=mean_loss", "#curve", "data-live", "open"),
        ("**/curve/now?series=learning_rate", "#curve", "data-other-step", "1"),
        ("**/curve?series=mean_loss", "#compare", "data-points", "1 0"),
    ],
    ids=["loss", "another series", "compared"],
)
def test_a_curve_whose_first_read_fails_is_told_and_read_again(
    browse, watched, ui_service, asked: str, root: str, attribute: str, value: str
) -> None:
    told = '<p class="notice">Not now: the service stops <code>unavailable</code></p>'
    with (
        stepping(ui_service.url, ui_service.cats.key) as client,
        stepping(ui_service.url, ui_service.dogs.key) as other,
    ):
        client.step()
        page, beside = browse(ui_service.cats), browse(ui_service.dogs)
        watched[0].expected += ["Failed to load resource"]
        page.route(asked, answering(503, told))
        with closing(RawClient(ui_service.url, ui_service.cats.key)) as raw:
            compared = f"compare?run={client.run}&run={raw.model(BASE_NAME)}"
        page.goto(f"/ui/runs/{compared if root == '#compare' else client.run}")
        expect(page.locator("#unreached")).to_contain_text(f"Not now: the service stops. {OLD}")
        beside.goto(f"/ui/runs/{other.run}")
        expect(beside.locator("#curve")).to_have_attribute("data-live", "open")
        page.unroute(asked)
        expect(page.locator(root)).to_have_attribute(attribute, value)
        expect(page.locator("#unreached")).to_be_hidden()
        expect(page.locator("#loss-plot .uplot")).to_have_count(1)
        expect(beside.locator("#unreached")).to_be_hidden()


@pytest.mark.parametrize(
    ("failing", "place", "root", "attribute", "value"),
    [
        ("mean_loss", "compare?run={0}&run={1}", "#compare", "data-series", "tokens"),
        ("learning_rate", "{0}", "#curve", "data-other-step", "1"),
    ],
    ids=["compared", "run"],
)
def test_another_series_ends_the_line_about_the_one_that_was_not_read(
    browse, watched, ui_service, failing: str, place: str, root: str, attribute: str, value: str
) -> None:
    with (
        stepping(ui_service.url, ui_service.cats.key) as client,
        stepping(ui_service.url, ui_service.dogs.key) as other,
        closing(RawClient(ui_service.url, ui_service.cats.key)) as raw,
    ):
        client.step()
        page, beside = browse(ui_service.cats), browse(ui_service.dogs)
        watched[0].expected += ["Failed to load resource"]
        page.route(re.compile(rf"/curve(/now)?\?series={failing}"), answering(503, ""))
        page.goto(f"/ui/runs/{place.format(client.run, raw.model(BASE_NAME))}")
        beside.goto(f"/ui/runs/{other.run}")
        expect(page.locator("#unreached")).to_be_visible()
        page.locator("#series").select_option("tokens")
        expect(page.locator(root)).to_have_attribute(attribute, value)
        expect(page.locator("#unreached")).to_be_hidden()
        expect(beside.locator("#unreached")).to_be_hidden()


def test_a_compared_run_that_is_refused_for_good_hides_no_other_and_is_asked_for_once(
    browse, watched, ui_service
) -> None:
    with (
        stepping(ui_service.url, ui_service.cats.key) as client,
        closing(RawClient(ui_service.url, ui_service.cats.key)) as raw,
    ):
        client.step()
        page, gone, asked = browse(ui_service.cats), raw.model(BASE_NAME), list[str]()
        watched[0].expected += ["Failed to load resource"]
        page.clock.install()
        page.route(re.compile(rf"/{quote(gone)}/curve(/now)?\?"), answering(404, ""))
        page.on("request", lambda request: asked.append(request.url) if "?series=" in request.url else None)
        page.goto(f"/ui/runs/compare?run={client.run}&run={gone}")
        expect(page.locator("#compare")).to_have_attribute("data-points", "1 -")
        expect(page.locator("#loss-plot .uplot")).to_have_count(1)
        expect(page.locator(".legend [data-value]").last).to_have_text("not read")
        for _ in range(3):
            page.clock.run_for(3100)
        assert len(asked) == 2, asked


def test_a_small_curve_whose_read_fails_is_read_again(browse, watched, ui_service) -> None:
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step()
        page = browse(ui_service.cats)
        watched[0].expected += ["Failed to load resource"]
        page.clock.install()
        figures = page.locator("#metrics .small-plot[data-series]")
        page.route("**/curve?series=grad_norm", answering(503, ""), times=1)
        with page.expect_response("**/curve/now?series=grad_norm"):
            with page.expect_response("**/curve?series=grad_norm"):
                page.goto(f"/ui/runs/{client.run}")
                figures.first.scroll_into_view_if_needed()
                page.clock.run_for(1000)
            page.clock.run_for(16_000)
        expect(page.locator('#metrics [data-series="grad_norm"]')).to_have_attribute("data-points", "1")
        expect(page.locator('#metrics [data-series="grad_norm"] .uplot')).to_have_count(1)
