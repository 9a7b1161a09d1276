"""Keyboard: every link, field and button of every page is reached by tab, seen when it has the focus, and works by enter."""

from playwright.sync_api import Page, expect

from tests.ui.test_operators import PAGES

_NAME = """
const named = (one) =>
  [one.tagName, one.id, one.name, one.getAttribute("href"), one.innerText].map((part) => part ?? "").join("|").slice(0, 200);
"""
_WANTED = f"""
() => {{
  {_NAME}
  const all = document.querySelectorAll("a[href], button, input:not([type=hidden]), select, textarea, summary");
  return [...all].filter((one) => one.checkVisibility() && !one.disabled).map(named);
}}
"""
_FOCUSED = f"""
() => {{
  {_NAME}
  const one = document.activeElement;
  const style = getComputedStyle(one);
  const isSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  return one === document.body ? null : [named(one), isSeen];
}}
"""
_MOST_STOPS = 300


def reached_by_tab(page: Page) -> dict[str, bool]:
    """Press tab until the page is left; return what had the focus, and whether that was seen."""
    found: dict[str, bool] = {}
    page.evaluate("document.activeElement.blur()")
    for _ in range(_MOST_STOPS):
        page.keyboard.press("Tab")
        focused = page.evaluate(_FOCUSED)
        if focused is None or (len(found) > 1 and focused[0] == next(iter(found))):
            return found
        found[focused[0]] = focused[1]
    raise AssertionError(f"tab does not leave {page.url}")


def check(page: Page) -> None:
    """Check that tab reaches all that a mouse does, and that the focus is seen."""
    wanted = page.evaluate(_WANTED)
    found = reached_by_tab(page)
    assert set(wanted) - found.keys() == set(), page.url
    assert [name for name, is_seen in found.items() if not is_seen] == [], page.url


def test_tab_reaches_everything_on_a_tenants_pages_and_shows_it(browse, ui_service, cat) -> None:
    page = browse(ui_service.cats)
    links = page.get_by_role("navigation", name="Pages").get_by_role("link")
    paths = [str(link.get_attribute("href")) for link in links.all()]
    for path in (*paths, f"/ui/runs/{cat.run}", f"/ui/adapters/{cat.run}"):
        page.goto(path)
        check(page)


def test_tab_reaches_everything_on_operators_pages_and_shows_it(operate) -> None:
    page = operate()
    for name in PAGES:
        page.goto(f"/ops/{name}")
        check(page)


def test_a_login_a_form_and_a_dangerous_button_work_without_a_mouse(browse, ui_service) -> None:
    page = browse(None)
    page.goto("/ui/login")
    page.get_by_label("API key").focus()
    page.keyboard.type(ui_service.cats.key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.goto("/ui/keys")
    page.get_by_label("Note").focus()
    page.keyboard.type("by keyboard")
    page.keyboard.press("Enter")
    prefix = page.locator("#secret").inner_text()[:16]
    page.goto("/ui/keys")
    row = page.locator("tr", has_text=prefix)
    row.get_by_text("Revoke…").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name=f"Revoke {prefix}")).to_be_focused()
    page.keyboard.press("Enter")
    expect(row).to_contain_text("revoked")
    other = browse(ui_service.dogs)
    other.goto("/ui/keys")
    assert prefix not in other.content()
