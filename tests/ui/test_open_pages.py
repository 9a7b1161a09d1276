"""A page that stays open: its times grow older, rows that came live tell theirs alike, and curves follow the colour scheme."""

import re
from contextlib import closing
from urllib.parse import quote

from playwright.sync_api import Page, expect

from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient
from tests.ui.browser import Watched
from tests.ui.stepping import stepping

AGE = re.compile(r"^(now|\d+\u202f(s|min) ago)$")
EXACT = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$")
HAS_COLOUR = """
(wanted) => {
  const canvas = document.querySelector("#loss-plot canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(wanted.slice(at, at + 2), 16));
  for (let at = 0; at < data.length; at += 4)
    if (data[at] === red && data[at + 1] === green && data[at + 2] === blue && data[at + 3] === 255) return true;
  return false;
}
"""


def curve_colour(page: Page) -> str:
    """Return the first curve's colour in the page's scheme, as six hexadecimal digits."""
    name = "getComputedStyle(document.documentElement).getPropertyValue('--curve-1').trim()"
    return str(page.evaluate(name))


def test_times_grow_older_on_an_open_page_and_live_rows_tell_theirs_alike(browse, ui_service) -> None:
    with (
        stepping(ui_service.url, ui_service.cats.key) as client,
        stepping(ui_service.url, ui_service.dogs.key) as other,
    ):
        page, beside = browse(ui_service.cats), browse(ui_service.dogs)
        page.clock.install()
        page.goto(f"/ui/runs/{client.run}")
        beside.goto(f"/ui/runs/{other.run}")
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        client.step()
        client.save()
        mark = page.locator('#marks tr[data-kind="publication"] time')
        expect(mark).to_have_text(AGE)
        expect(mark).to_have_attribute("title", EXACT)
        page.clock.fast_forward("03:00:00")
        started = page.locator("main time").first
        expect(started).to_have_text("3\u202fh ago")
        expect(mark).to_have_text(re.compile(r"^(2|3)\u202fh ago$"))
        told = mark.get_attribute("title")
        page.reload()
        expect(mark).to_have_attribute("title", told or "")
        expect(beside.locator("main time").first).to_have_text(AGE)


def test_curves_follow_a_change_of_the_colour_scheme(browse, ui_service) -> None:
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step()
        client.step()
        page, beside = browse(ui_service.cats, color_scheme="light"), browse(ui_service.cats, color_scheme="light")
        for one in (page, beside):
            one.goto(f"/ui/runs/{client.run}")
        light = curve_colour(page)
        page.wait_for_function(HAS_COLOUR, arg=light)
        page.emulate_media(color_scheme="dark")
        dark = curve_colour(page)
        assert dark != light
        page.wait_for_function(HAS_COLOUR, arg=dark)
        assert not page.evaluate(HAS_COLOUR, light)
        assert beside.evaluate(HAS_COLOUR, light)


def swapped(page: Page, part: str) -> None:
    """Wait until a part that refreshes itself has come anew."""
    page.locator(f"{part} time").first.evaluate("(one) => one.setAttribute('data-old', '')")
    expect(page.locator(f"{part} time[data-old]")).to_have_count(0)
    expect(page.locator(f"{part} time").first).to_be_visible()


def check_ages(page: Page, watched: Watched, place: str, path: str, fresh: re.Pattern[str] = AGE) -> None:
    """Assert that times are right just after a part came anew, and three hours older when no part comes any more."""
    page.clock.install()
    page.goto(place)
    swapped(page, f'[hx-get^="{path}"]')
    time = page.locator(f'[hx-get^="{path}"] time').first
    expect(time).to_have_text(fresh)
    expect(time).to_have_attribute("title", EXACT)
    told = time.get_attribute("datetime")
    watched.expected += ["net::ERR", "Failed to load resource", "htmx:"]
    page.route(f"**{path}*", lambda route: route.abort())
    page.clock.fast_forward("03:00:00")
    same = page.locator(f'[hx-get^="{path}"] time[datetime="{told}"]').first
    expect(same).to_have_text(re.compile(r"^[1-5]\u202fh ago$"))
    expect(same).to_have_attribute("title", EXACT)
    page.unroute(f"**{path}*")
    # The next part tells the service's own time again.
    page.clock.fast_forward("00:00:10")
    swapped(page, f'[hx-get^="{path}"]')


def test_times_of_parts_that_come_anew_are_right_and_grow_older(browse, operate, watched, ui_service) -> None:
    with (
        closing(RawClient(ui_service.url, ui_service.cats.key)) as client,
        stepping(ui_service.url, ui_service.dogs.key) as other,
    ):
        run = client.model(BASE_NAME)
        late = client.step(run, 2)
        other.step()
        for place, path in (("/ui", "/ui/parts/overview"), ("/ui/queue", "/ui/queue/table")):
            check_ages(browse(ui_service.cats), watched[-1], place, path)
        # Another test may have left a process that began an hour ago.
        began = re.compile(r"^(now|\d+\u202f(s|min|h) ago)$")
        check_ages(operate(), watched[-1], "/ops/processes", "/ops/processes/now", began)
        beside = browse(ui_service.dogs)
        beside.goto("/ui/queue")
        expect(beside.get_by_text("Nothing waits")).to_be_visible()
        client.result(client.step(run, 1))
        client.result(late)


def test_times_of_gates_grow_older_in_the_list_and_on_the_adapters_page(
    browse, watched, ui_service, speakers, cat
) -> None:
    """A list tells when a pause ends, which comes nearer and is over then; an adapter's page also since when it is paused."""
    cat.gate("pause", mode="keep", ttl_seconds=3600, timeout_seconds=0)
    ends = re.compile(r"^in (1\u202fh|5\d\u202fmin)$")
    check_ages(browse(ui_service.cats), watched[-1], "/ui/adapters", "/ui/adapters/table", ends)
    adapter = f"/ui/adapters/{quote(cat.run)}"
    check_ages(browse(ui_service.cats), watched[-1], adapter, f"{adapter}/panel")
    beside = browse(ui_service.dogs)
    beside.goto(f"/ui/adapters/{quote(speakers[1].run)}")
    expect(beside.locator(".gate-panel")).to_have_attribute("data-state", "open")
    expect(beside.locator(".gate-panel time")).to_have_count(0)


def test_a_runs_last_request_is_told_anew_while_its_row_is_in_sight(browse, ui_service) -> None:
    """The row's steps go on; a last request that only grew older beside them would be false."""
    with (
        stepping(ui_service.url, ui_service.cats.key) as client,
        stepping(ui_service.url, ui_service.dogs.key) as other,
    ):
        page, beside = browse(ui_service.cats), browse(ui_service.dogs)
        for one, run in ((page, client.run), (beside, other.run)):
            one.goto("/ui/runs")
            expect(one.locator(f'tr[data-run="{run}"] [data-field="at"] time')).to_have_text(AGE)
        times = [
            one.locator(f'tr[data-run="{run}"] [data-field="at"] time')
            for one, run in ((page, client.run), (beside, other.run))
        ]
        first, theirs = (time.get_attribute("datetime") for time in times)
        client.step(2)
        expect(page.locator(f'tr[data-run="{client.run}"] [data-field="steps"]')).to_have_text("2")
        expect(times[0]).not_to_have_attribute("datetime", first or "")
        expect(times[0]).to_have_text(AGE)
        expect(times[0]).to_have_attribute("title", EXACT)
        expect(times[1]).to_have_attribute("datetime", theirs or "")
