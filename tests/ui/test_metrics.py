"""All of a run's metrics on its page: a small curve of each, whose last values and file are those of the API."""

import httpx
from playwright.sync_api import Locator, expect

from tests.ui.stepping import stepping


def add_metrics(url: str, key: str, run: str, values: dict[int, dict[str, float | None]]) -> None:
    points = [{"step": step, "metrics": metrics} for step, metrics in values.items()]
    address = f"{url}/api/weft/v1/runs/{run}/points"
    httpx.post(address, json={"points": points}, headers={"X-API-Key": key}, timeout=40).raise_for_status()


def test_every_metric_has_a_small_curve_that_follows(browse, axe, ui_service) -> None:
    url, key = ui_service.url, ui_service.cats.key
    page, stranger = browse(ui_service.cats), browse(ui_service.dogs)
    with stepping(url, key) as client:
        page.goto(f"/ui/runs/{client.run}")
        expect(page.locator("#metrics")).to_be_hidden()
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        client.step(2)
        expect(page.locator("#metrics")).to_be_visible()
        expect(page.locator('[data-figure="steps"]')).to_have_text("2")
        add_metrics(url, key, client.run, {1: {"reward": 0.25}, 7: {"reward": 0.5, "=eval/loss": 3.0}})
        page.reload()
        reward = page.locator('[data-series="metric:reward"]')
        reward.scroll_into_view_if_needed()
        expect(reward).to_have_attribute("data-points", "2")
        expect(reward.locator("[data-last]")).to_have_text("0.5")
        expect(reward.locator("[data-step]")).to_have_text("7")
        rate = page.locator('[data-series="learning_rate"]')
        expect(rate).to_have_attribute("data-points", "2")
        expect(rate.locator("[data-last]")).to_have_text("0.001")
        # No sampled token is trained on, so nothing is known of the sampler's distance.
        expect(page.locator('[data-series="sampling_kl"]')).to_be_hidden()
        client.step()
        expect(rate).to_have_attribute("data-points", "3")
        axe(page)
        file = page.request.get(f"/ui/runs/{client.run}/metrics.csv").text().splitlines()
        cells = [line.split(",") for line in file]
        assert [(name, step, value) for name, step, _, value in cells[1:]] == [
            ("'=eval/loss", "7", "3.0"),
            ("reward", "1", "0.25"),
            ("reward", "7", "0.5"),
        ]
        assert stranger.request.get(f"/ui/runs/{client.run}/metrics.csv").status == 404


def test_a_metric_that_first_comes_while_the_page_is_open_is_shown(browse, axe, ui_service) -> None:
    """Names are hostile. A neighbour's open page shows none of them."""
    url, name = ui_service.url, '<img src=x onerror="alert(1)">\u202ereward'
    page, beside = browse(ui_service.cats), browse(ui_service.dogs)
    with stepping(url, ui_service.cats.key) as client, stepping(url, ui_service.dogs.key) as other:
        for one, run in ((page, client.run), (beside, other.run)):
            one.goto(f"/ui/runs/{run}")
            expect(one.locator("#curve")).to_have_attribute("data-live", "open")
        add_metrics(url, ui_service.cats.key, client.run, {3: {name: 0.25, "plain": 1.0}})
        for stepped in (client, other):
            stepped.step()
        figures = page.locator('#metrics [data-series^="metric:"]')
        expect(figures).to_have_count(2)
        reward = figures.filter(has_text="U+202E")
        reward.scroll_into_view_if_needed()
        expect(reward).to_have_attribute("data-points", "1")
        expect(reward.locator("[data-last]")).to_have_text("0.25")
        expect(reward.locator("[data-step]")).to_have_text("3")
        assert table_of(reward) == [["3", "0.25"]]
        expect(page.get_by_role("link", name="Own metrics as CSV")).to_be_visible()
        client.step()
        expect(page.locator('[data-series="learning_rate"]')).to_have_attribute("data-points", "2")
        expect(figures).to_have_count(2)
        axe(page)
        page.reload()
        expect(reward).to_have_attribute("data-points", "1")
        expect(beside.locator('[data-figure="steps"]')).to_have_text("1")
        expect(beside.locator('#metrics [data-series^="metric:"]')).to_have_count(0)


def test_own_metrics_are_read_again_while_they_are_in_sight(browse, ui_service) -> None:
    """The page's clock is the test's."""
    url, key = ui_service.url, ui_service.cats.key
    page = browse(ui_service.cats)
    with stepping(url, key) as client:
        add_metrics(url, key, client.run, {1: {"reward": 1.0}})
        page.clock.install()
        page.goto(f"/ui/runs/{client.run}")
        reward = page.locator('[data-series="metric:reward"]')
        reward.scroll_into_view_if_needed()
        expect(reward).to_have_attribute("data-points", "1")
        add_metrics(url, key, client.run, {2: {"reward": 2.0}})
        page.clock.run_for(15_000)
        expect(reward).to_have_attribute("data-points", "2")
        expect(reward.locator("[data-last]")).to_have_text("2")


def test_a_metric_that_comes_later_is_chosen_as_another_series_and_goes_on(browse, axe, ui_service) -> None:
    """The page's clock is the test's. Names are hostile, and a neighbour's open page offers none of them."""
    url, key, name = ui_service.url, ui_service.cats.key, '<img src=x onerror="alert(1)">\u202ereward'
    page, beside = browse(ui_service.cats), browse(ui_service.dogs)
    own = page.locator('#series optgroup[label="Your metrics"] option')
    with stepping(url, key) as client, stepping(url, ui_service.dogs.key) as other:
        page.clock.install()
        for one, run in ((page, client.run), (beside, other.run)):
            one.goto(f"/ui/runs/{run}")
            expect(one.locator("#curve")).to_have_attribute("data-live", "open")
        expect(own).to_have_count(0)
        add_metrics(url, key, client.run, {4: {name: 0.25}})
        for stepped in (client, other):
            stepped.step()
        expect(own).to_have_count(1)
        expect(own).to_have_text('<img src=x onerror="alert(1)">U+202Ereward')
        add_metrics(url, key, client.run, {4: {"plain": 1.0}})
        client.step()
        expect(own).to_have_count(2)
        page.get_by_label("Series").select_option(f"metric:{name}")
        expect(page.locator("#curve")).to_have_attribute("data-other-step", "4")
        add_metrics(url, key, client.run, {9: {name: 0.5}})
        page.clock.run_for(15_000)
        expect(page.locator("#curve")).to_have_attribute("data-other-step", "9")
        client.step()
        expect(page.locator("#curve")).to_have_attribute("data-points", "3")
        expect(own).to_have_count(2)
        expect(page.locator("#curve")).to_have_attribute("data-other-step", "9")
        axe(page)
        expect(beside.locator("#curve")).to_have_attribute("data-points", "1")
        expect(beside.locator("#series optgroup")).to_have_count(0)


def table_of(figure: Locator) -> list[list[str]]:
    """Return steps and values of a metric's table."""
    rows: list[list[str]] = figure.locator("tbody").evaluate(
        "(body) => [...body.rows].map((row) => [...row.cells].slice(0, 2).map((cell) => cell.textContent))"
    )
    return rows


def test_a_metric_of_ones_own_has_a_table_of_its_last_values_that_follows(browse, axe, ui_service) -> None:
    url, key = ui_service.url, ui_service.cats.key
    page, plain = browse(ui_service.cats), browse(ui_service.cats, java_script_enabled=False)
    stranger = browse(ui_service.dogs)
    with stepping(url, key) as client, stepping(url, ui_service.dogs.key) as other:
        add_metrics(url, key, client.run, {step: {"reward": step / 4} for step in range(1, 61)})
        add_metrics(url, key, client.run, {3: {"=odd": None}})
        add_metrics(url, ui_service.dogs.key, other.run, {1: {"reward": 77.0}})
        expected = [[str(step), f"{step / 4:g}"] for step in range(60, 10, -1)]
        page.clock.install()
        for one in (plain, page):
            one.goto(f"/ui/runs/{client.run}")
            reward = one.locator('[data-series="metric:reward"]')
            expect(reward.get_by_role("table")).to_be_hidden()
            reward.get_by_text("Last 50 values").click()
            expect(reward.get_by_role("table")).to_be_visible()
            assert table_of(reward) == expected
            assert table_of(one.locator('[data-series="metric:=odd"]')) == [["3", "not finite"]]
        expect(reward).to_have_attribute("data-points", "60")
        axe(page)
        add_metrics(url, key, client.run, {61: {"reward": 1234.5}, 60: {"reward": -1.0}})
        page.clock.run_for(15_000)
        expect(reward).to_have_attribute("data-points", "61")
        live = [["61", "1\u202f234"], ["60", "-1"], *expected[1:-1]]
        assert table_of(reward) == live
        plain.reload()
        assert table_of(plain.locator('[data-series="metric:reward"]')) == live
        # Of a curve that is drawn by its least and greatest values, the table still has each of the last.
        for begin in (62, 1062):
            add_metrics(url, key, client.run, {step: {"reward": step / 8} for step in range(begin, begin + 1000)})
        page.clock.run_for(15_000)
        expect(reward).to_have_attribute("data-points", "2061")
        plain.reload()
        assert table_of(reward) == table_of(plain.locator('[data-series="metric:reward"]'))
        assert table_of(reward)[0] == ["2\u202f061", "257.6"]
        stranger.goto(f"/ui/runs/{other.run}")
        assert table_of(stranger.locator('[data-series="metric:reward"]')) == [["1", "77"]]
        assert stranger.request.get(f"/ui/runs/{client.run}").status == 404


TICKS = """
(ends) => import("/ui/static/curves.js").then(({ tickedScale }) => ends.map(([least, greatest]) => {
  const { range, splits } = tickedScale(3);
  const [low, high] = range(null, least, greatest);
  return splits(null, 1, low, high);
}))
"""


def test_the_ticks_of_an_axis_enclose_the_values_whatever_their_size(browse, ui_service) -> None:
    page = browse(ui_service.cats)
    ends = [
        (0.0, 3900.0),
        (1.9, 7011.0),
        (0.0021, 0.0024),
        (-3.0, 8.5),
        (1e-9, 1e12),
        (2.0, 2.0),
        (-1e308, 1e308),
        (0.0, 5e-324),
    ]
    with stepping(ui_service.url, ui_service.cats.key) as client:
        page.goto(f"/ui/runs/{client.run}")
        for (least, greatest), ticks in zip(ends, page.evaluate(TICKS, ends), strict=True):
            assert 2 <= len(ticks) <= 6, (least, greatest, ticks)
            if 1e-300 < greatest - least < 1e300:
                assert ticks[0] <= least
                assert greatest <= ticks[-1] * (1 + 1e-9)


def test_a_cards_step_is_the_newest_though_it_is_not_drawn_yet(browse, ui_service) -> None:
    """Cards are drawn when they come into sight; all of them tell the run's last step."""
    page = browse(ui_service.cats, viewport={"width": 1280, "height": 300})
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step()
        page.goto(f"/ui/runs/{client.run}")
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        cards = page.locator("#metrics [data-series] [data-step]")
        assert set(cards.all_text_contents()) == {"1"}
        client.step()
        expect(page.locator('[data-series="tokens"] [data-step]')).to_have_text("2")
        assert set(cards.all_text_contents()) == {"2"}
