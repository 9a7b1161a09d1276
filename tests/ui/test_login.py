"""Logging in to the dashboard and out of it, in a browser."""

import re

import httpx
from playwright.sync_api import expect

from testing.operator_command import weft


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
    assert ui_service.cats.key.split("-")[2] not in str(cookies)


def test_a_link_with_a_code_logs_in_once_also_where_the_login_is_open_already(browse, watched, ui_service) -> None:
    """The address then changes in its fragment alone, and no page is loaded."""
    page = browse(None)
    link = weft(ui_service.data, "ui", "open", ui_service.dogs.key).split()[0]
    page.goto("/ui/login")
    page.evaluate("(fragment) => { location.hash = fragment; }", link.partition("#")[2])
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert "code" not in page.url
    watched[0].expected.append("401")
    other = browse(None)
    watched[1].expected.append("401")
    other.goto(f"/ui/login#{link.partition('#')[2]}")
    expect(other.get_by_role("alert")).to_contain_text("was used before")
    assert "code=" not in other.url


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
    second.get_by_role("button", name="End").first.click()
    expect(second.get_by_role("heading", name="Web sessions")).to_be_visible()
    first.goto("/ui")
    expect(first.get_by_label("API key")).to_be_visible()
