"""Logging in to the dashboard and out of it, in a browser."""

import re

import httpx
import pytest
from playwright.sync_api import Page, Request, expect

from tests.ui.browser import expect_ended
from tests.ui.conftest import UiService, assert_no_secret_is_kept


def test_a_key_becomes_a_session_and_stays_nowhere_in_the_browser(browse, axe, ui_service) -> None:
    page = browse(None)
    page.goto("/ui")
    expect(page).to_have_url(re.compile(r"/ui/login"))
    axe(page)
    page.get_by_label("API key").fill(ui_service.cats.key)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    axe(page)
    cookies = page.context.cookies()
    assert [(one["name"], one["secure"], one["httpOnly"], one["sameSite"], one["path"]) for one in cookies] == [
        ("__Host-weft", True, True, "Lax", "/")
    ]
    kept = page.evaluate(
        "() => JSON.stringify([{...localStorage}, {...sessionStorage}, location.href, document.cookie])"
    )
    assert ui_service.cats.key not in kept + page.content() + ui_service.process.log_tail(10**6)
    assert ui_service.cats.key.split("-", 2)[2] not in str(cookies)


def history(page: Page) -> list[str]:
    """Return what the browser keeps of each page before and after this one."""
    told = page.context.new_cdp_session(page).send("Page.getNavigationHistory")
    assert len(told["entries"]) > 1
    return [str(one) for one in told["entries"]]


def note_requests(page: Page) -> list[Request]:
    """Note the page's requests."""
    noted: list[Request] = []
    page.on("request", lambda asked: noted.append(asked))
    return noted


def check_code_is_nowhere(page: Page, code: str, requests: list[Request], service: UiService) -> None:
    """Assert that a code that was used is in no address, header, page, log or row, and not in the form that has sent it."""
    assert any("/login/code" in one.url for one in requests)
    for one in requests:
        assert code not in f"{one.url} {one.headers}"
        assert one.headers.get("referer", "") == "", one.url
    assert code not in " ".join(history(page))
    assert_no_secret_is_kept(service)
    page.go_back()
    assert code not in page.content() + " ".join(history(page))
    for field in page.locator("[name=code]").all():
        assert field.input_value() == ""
    page.go_forward()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    kept = (
        "() => JSON.stringify([{...localStorage}, {...sessionStorage}, history.state, document.referrer, window.name])"
    )
    assert code not in page.evaluate(kept)


@pytest.mark.parametrize("is_open", [False, True], ids=["opened", "open already"])
@pytest.mark.parametrize("place", ["/ui", "/ops"])
def test_a_link_with_a_code_logs_in_once_and_leaves_nothing(
    browse, watched, ui_service, place: str, is_open: bool
) -> None:
    """A login that is open already has its address changed in the fragment alone, and loads no page."""
    if place == "/ui":
        link = ui_service.link(ui_service.dogs.key, address=ui_service.url)
    else:
        link = ui_service.link(ui_service.operator_key, "--operator", address=ui_service.ops_url)
    assert f"{place}/login#code=" in link
    page, beside = browse(None), browse(ui_service.cats)
    requests = note_requests(page)
    address, _, fragment = link.partition("#")
    if is_open:
        page.goto(address)
        page.evaluate("(fragment) => { location.hash = fragment; }", fragment)
    else:
        page.goto(link)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    check_code_is_nowhere(page, ui_service.codes[-1], requests, ui_service)
    other = browse(None)
    watched[-1].expected.append("401")
    other.goto(link)
    expect(other.get_by_role("alert")).to_contain_text("was used before")
    assert "code=" not in other.url
    beside.reload()
    expect(beside.get_by_role("heading", name="Overview")).to_be_visible()


def test_a_wrong_key_is_told_alike_whatever_is_wrong(browse, watched, ui_service) -> None:
    page = browse(None)
    watched[0].expected.append("401")
    texts = set()
    secret = ui_service.cats.key
    for wrong in ("nonsense", secret[:-1] + ("0" if secret[-1] != "0" else "1"), "tml-000000000000-" + secret[17:]):
        page.goto("/ui/login")
        page.get_by_label("API key").fill(wrong)
        page.get_by_role("button", name="Log in").click()
        alert = page.get_by_role("alert")
        expect(alert).to_be_visible()
        texts.add(alert.inner_text())
        assert wrong not in page.content()
    assert len(texts) == 1


def test_after_a_logout_the_back_button_shows_the_login(browse, ui_service) -> None:
    page = browse(ui_service.cats)
    before = page.context.cookies()[0]["value"]
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/ui/login")
    assert page.context.cookies() == []
    page.go_back()
    expect(page.get_by_label("API key")).to_be_visible()
    answer = httpx.get(ui_service.url + "/ui", headers={"Cookie": f"__Host-weft={before}"}, timeout=40)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login")


def test_each_login_has_a_session_of_its_own(browse, ui_service, watched) -> None:
    first, second = browse(ui_service.dogs), browse(ui_service.dogs)
    # The first page may ask for news just after its session ended.
    watched[0].expected += ["401"]
    values = {page.context.cookies()[0]["value"] for page in (first, second)}
    assert len(values) == 2
    second.goto("/ui/sessions")
    second.get_by_role("button", name="End", exact=True).first.click()
    expect(second.get_by_role("heading", name="Web sessions")).to_be_visible()
    expect_ended(first, "/ui")


def test_all_other_sessions_of_a_key_and_of_the_tenant_end_by_one_button(browse, axe, ui_service, watched) -> None:
    """Another tenant's sessions go on, and so does the one that ends the others."""
    own, beside, stranger = browse(ui_service.cats), browse(ui_service.cats), browse(ui_service.dogs)
    viewer = browse(ui_service.cats, role="viewer")
    for one in watched:
        # A page may ask for news just after its session ended.
        one.expected += ["401"]
    own.goto("/ui/sessions")
    axe(own)
    own.get_by_role("button", name="End all others of this key").click()
    expect(own.get_by_role("button", name="End all others of this key")).to_have_count(0)
    expect_ended(beside, "/ui/runs")
    viewer.goto("/ui/sessions")
    expect(viewer.get_by_role("heading", name="Web sessions")).to_be_visible()
    expect(viewer.get_by_role("button", name="End all others of the tenant")).to_have_count(0)
    own.get_by_role("button", name="End all others of the tenant").click()
    expect(own.locator("tbody tr")).to_have_count(1)
    expect(own.locator("tbody")).to_contain_text("this one")
    expect_ended(viewer, "/ui/runs")
    stranger.goto("/ui/sessions")
    expect(stranger.get_by_role("heading", name="Web sessions")).to_be_visible()
