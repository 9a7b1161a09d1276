"""Parts of pages that come anew while somebody uses them: focus, scroll, selection, fields and opened details are kept."""

from contextlib import closing
from urllib.parse import quote

import httpx
from playwright.sync_api import Locator, Page, Route, expect

from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient
from tests.ui.browser import read_anew
from tests.ui.still_queue import BASE
from tests.ui.stored import write_rows

NARROW = {"width": 420, "height": 900}
ASIDE = 30
SELECTED = "getSelection().toString()"


def put_aside(wrap: Locator) -> None:
    """Scroll a table sideways."""
    assert wrap.evaluate("(one) => one.scrollWidth - one.clientWidth") > ASIDE
    wrap.evaluate(f"(one) => (one.scrollLeft = {ASIDE})")


def expect_aside(wrap: Locator) -> None:
    assert wrap.evaluate("(one) => one.scrollLeft") == ASIDE


def test_a_queue_that_comes_anew_leaves_a_reader_where_she_is(browse, ui_service, still) -> None:
    """Both tenants read; the operations that end are of one of them, above what its reader has the focus on."""
    pages = {one.name: browse(one, viewport=NARROW) for one in (ui_service.cats, ui_service.dogs)}
    links = {}
    for name, page in pages.items():
        page.goto("/ui/queue")
        row = page.locator(f"tr[data-request='{still.passes[name][2]}']")
        links[name] = row.get_by_role("link")
        links[name].focus()
        row.locator("b").evaluate("(one) => getSelection().selectAllChildren(one)")
        put_aside(page.locator("#queue .table-wrap"))
    for page in pages.values():
        read_anew(page, "#queue")
    write_rows(ui_service.data, still.end_passes)
    for ended in still.passes["dogs"][:2]:
        expect(pages["dogs"].locator(f"tr[data-request='{ended}']")).to_have_count(0)
    expect(pages["cats"].locator(f"tr[data-request='{still.passes['cats'][0]}']")).to_contain_text("others about 4")
    for name, page in pages.items():
        expect(links[name]).to_be_focused()
        expect_aside(page.locator("#queue .table-wrap"))
        assert page.evaluate(SELECTED) == "forward"


def test_a_delivery_that_is_read_stays_open_when_another_comes_above_it(browse, ui_service) -> None:
    page, beside = browse(ui_service.cats, viewport=NARROW), browse(ui_service.dogs)
    headers = {"X-API-Key": ui_service.cats.key}
    address = f"{ui_service.url}/api/weft/v1/webhooks/kept"
    with httpx.Client(headers=headers, timeout=40) as http:
        http.put(address, json={"url": "https://kept.example/", "events": ["*"]}).raise_for_status()
        http.post(f"{address}/test").raise_for_status()
        page.goto("/ui/webhooks/kept")
        rows, wrap = page.locator("#deliveries tbody tr"), page.locator("#deliveries .table-wrap")
        expect(rows).to_have_count(1)
        rows.first.locator("summary").click()
        shown = rows.first.locator("pre").inner_text()
        put_aside(wrap)
        read_anew(page, "#deliveries")
        http.post(f"{address}/test").raise_for_status()
        expect(rows).to_have_count(2)
        read_anew(page, "#deliveries")
        expect(rows.last.locator("pre")).to_be_visible()
        assert rows.last.locator("pre").inner_text() == shown
        expect(rows.first.locator("pre")).to_be_hidden()
        expect(rows.last.locator("summary")).to_be_focused()
        expect_aside(wrap)
        http.delete(address).raise_for_status()
    beside.goto("/ui/webhooks")
    expect(beside.locator("[data-webhook=kept]")).to_have_count(0)


def test_a_gates_button_keeps_the_focus_and_sends_the_generation_that_is_shown(
    browse, ui_service, speakers, cat
) -> None:
    dog = speakers[1]
    cat.gate("pause", mode="keep", reason="first", timeout_seconds=0)
    page, beside = browse(ui_service.cats), browse(ui_service.dogs)
    page.goto(f"/ui/adapters/{quote(cat.run)}")
    beside.goto(f"/ui/adapters/{quote(dog.run)}")
    button, sent = page.get_by_role("button", name="Resume"), page.locator("#gate input[name=generation]").first
    button.focus()
    read_anew(page, "#gate")
    expect(button).to_be_focused()
    generation = cat.gate("pause", mode="wait", reason="second", timeout_seconds=0)["generation"]
    expect(page.locator("#gate")).to_contain_text("second")
    expect(sent).to_have_value(str(generation))
    expect(button).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".gate-panel")).to_have_attribute("data-state", "open")
    expect(page.locator("#gate").get_by_role("button")).to_have_count(0)
    expect(beside.locator(".gate-panel")).to_have_attribute("data-state", "open")


def check_table(page: Page, place: str) -> None:
    """Assert that the first table of a page's part keeps the focus and its scroll while it comes anew."""
    page.goto(place)
    wrap = page.locator("[hx-get] .table-wrap").first
    wrap.focus()
    put_aside(wrap)
    read_anew(page, "[hx-get]")
    expect(wrap).to_be_focused()
    expect_aside(wrap)


def test_tables_of_the_overviews_keep_focus_and_scroll(browse, operate, ui_service, speakers, still) -> None:
    with closing(RawClient(ui_service.url, ui_service.dogs.key)) as client:
        client.model(BASE_NAME)
        for place in ("/ui", "/ui/adapters"):
            check_table(browse(ui_service.dogs, viewport=NARROW), place)
    for name in ("overview", "tenants", "queue", "replicas", "processes"):
        check_table(operate(viewport=NARROW), f"/ops/{name}")


def test_operators_read_what_changes_and_stay_where_they_are(operate, ui_service, speakers, still) -> None:
    tenants, queue = operate(), operate()
    tenants.goto("/ops/tenants")
    queue.goto("/ops/queue")
    row, other = (tenants.locator(f"tr[data-tenant={name}]") for name in ("dogs", "cats"))
    link, wrap = row.get_by_role("link"), queue.locator("[hx-get] .table-wrap")
    line = queue.locator("tr", has=queue.get_by_text(BASE)).filter(has_text="forward").locator("td.number").first
    link.focus()
    wrap.focus()
    before = [int(one.get_attribute("data-pending") or 0) for one in (row, other)]
    expect(line).to_have_text("8")
    write_rows(ui_service.data, still.end_passes)
    expect(line).to_have_text("6")
    expect(row).to_have_attribute("data-pending", str(before[0] - 2))
    expect(other).to_have_attribute("data-pending", str(before[1]))
    expect(link).to_be_focused()
    expect(wrap).to_be_focused()


TWINS = [("failed", "first"), ("failed", "second"), ("other", "third"), ("failed", "fourth")]


def twins(rows: list[tuple[str, str]], number: int) -> str:
    """Return rows of which several have the same key."""
    return f"<p>answer {number}</p>" + "".join(
        f'<div data-key="{key}"><details><summary>{text}</summary>{number}</details><button>{text}</button></div>'
        for key, text in rows
    )


def test_rows_with_equal_keys_are_kept_the_nth_with_the_nth(browse, ui_service) -> None:
    page, beside = browse(ui_service.cats), browse(ui_service.dogs)
    told = {"content": twins(TWINS, 1)}
    for one in (page, beside):
        one.route(
            "**/ui/queue/table*",
            lambda route: route.fulfill(body=told["content"], content_type="text/html; charset=utf-8"),
        )
        one.goto("/ui/queue")
        expect(one.locator("#queue p").first).to_have_text("answer 1")
    page.locator("summary", has_text="second").click()
    page.get_by_role("button", name="fourth").focus()
    marks = "all => all.forEach((one, place) => (one.number = place))"
    page.locator("#queue [data-key]").evaluate_all(marks)
    kept = [TWINS[2], *TWINS[:2], ("new", "fifth"), TWINS[3]]
    told["content"] = twins(kept, 2)
    expect(page.locator("#queue p").first).to_have_text("answer 2")
    shown = page.locator("#queue [data-key]").evaluate_all(
        "all => all.map((one) => [one.querySelector('summary').textContent, one.number ?? null, "
        "one.querySelector('details').open])"
    )
    assert shown == [
        ["third", 2, False],
        ["first", 0, False],
        ["second", 1, True],
        ["fifth", None, False],
        ["fourth", 3, False],
    ]
    expect(page.get_by_role("button", name="fourth")).to_be_focused()
    told["content"] = twins(TWINS[:2], 3)
    expect(page.locator("#queue p").first).to_have_text("answer 3")
    expect(page.locator("#queue [data-key]")).to_have_count(2)
    expect(page.locator("#queue details[open] summary")).to_have_text("second")
    expect(beside.locator("#queue p").first).to_have_text("answer 3")
    expect(beside.locator("#queue details[open]")).to_have_count(0)


ROWS = ("a", "b", "c")


def content(number: int) -> str:
    """Return a part that differs each time: fields have other values, and rows are in another order."""
    rows = "".join(
        f'<div data-key="{name}"><details><summary>{name}</summary>{number}</details><button>{name}</button></div>'
        for name in ROWS[number % 3 :] + ROWS[: number % 3]
    )
    return (
        f"<p>answer {number}</p><label>Text <input id='text' value='{number}'></label>"
        f"<label>Long <textarea id='long'>{number}</textarea></label>"
        f"<label>Tick <input id='tick' type='checkbox' {'checked' if number % 2 else ''}></label>"
        f"<label>One of <select id='choice'><option {'selected' if number % 2 else ''}>x</option>"
        f"<option>y</option></select></label>"
        f"<input type='hidden' id='told' value='{number}'>{rows}"
    )


def test_fields_that_a_person_changed_and_details_are_kept_while_rows_change_places(browse, ui_service) -> None:
    page, beside = browse(ui_service.cats), browse(ui_service.dogs)
    told = {"number": 1, "last": 1}

    def answer(route: Route) -> None:
        told["number"] = min(told["number"] + 1, told["last"])
        route.fulfill(body=content(told["number"]), content_type="text/html; charset=utf-8")

    page.route("**/ui/queue/table*", answer)
    beside.goto("/ui/queue")
    page.goto("/ui/queue")
    expect(page.locator("#queue p").first).to_have_text("answer 1")
    page.get_by_label("Text").fill("mine")
    page.get_by_label("Long").fill("my own")
    page.get_by_label("Tick").set_checked(True)
    page.get_by_label("One of").select_option("y")
    page.locator("[data-key=b] summary").click()
    page.locator("[data-key=a] button").focus()
    told["last"] = last = 5
    expect(page.locator("#queue p").first).to_have_text(f"answer {last}")
    order = page.locator("#queue [data-key]").evaluate_all("all => all.map((one) => one.dataset.key)")
    assert tuple(order) == ROWS[last % 3 :] + ROWS[: last % 3]
    expect(page.locator("#told")).to_have_value(str(last))
    expect(page.locator("[data-key=b] details")).to_have_attribute("open", "")
    expect(page.locator("[data-key=b] details")).to_contain_text(str(last))
    expect(page.locator("[data-key=a] details")).not_to_have_attribute("open", "")
    expect(page.locator("[data-key=a] button")).to_be_focused()
    expect(page.get_by_label("Text")).to_have_value("mine")
    expect(page.get_by_label("Long")).to_have_value("my own")
    expect(page.get_by_label("Tick")).to_be_checked()
    expect(page.get_by_label("One of")).to_have_value("y")
    expect(beside.locator("#told")).to_have_count(0)
