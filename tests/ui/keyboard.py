"""Pages by keyboard: what tab reaches, and whether the focus is seen."""

from playwright.sync_api import Page

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
_FROM_THE_TOP = """
() => {
  const start = document.createElement("span");
  start.tabIndex = -1;
  document.body.prepend(start);
  start.focus();
  start.remove();
}
"""
"""Has the next tab begin before the first element, also on a page with a field that has the focus from the start."""
_MOST_STOPS = 300


def reached_by_tab(page: Page) -> dict[str, bool]:
    """Press tab until the page is left; return what had the focus, and whether that was seen."""
    found: dict[str, bool] = {}
    page.evaluate(_FROM_THE_TOP)
    for _ in range(_MOST_STOPS):
        page.keyboard.press("Tab")
        focused = page.evaluate(_FOCUSED)
        if focused is None or (len(found) > 1 and focused[0] == next(iter(found))):
            return found
        found[focused[0]] = focused[1]
    raise AssertionError(f"tab does not leave {page.url}")


def check_reachable(page: Page) -> None:
    """Fail unless tab reaches all that a mouse does, and the focus is seen."""
    wanted = page.evaluate(_WANTED)
    found = reached_by_tab(page)
    assert set(wanted) - found.keys() == set(), page.url
    assert [name for name, is_seen in found.items() if not is_seen] == [], page.url
