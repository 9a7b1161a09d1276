"""Write a picture of every page into docs/screenshots, and the page of the docs that shows them: ``make screenshots``.

A page is one that the routes name. Its address is a link of a page before it, so a page that nothing leads to is told as such.
"""

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from bench.screenshots.pages import address, is_page, name_of, operator_pages, tenant_pages
from bench.screenshots.picture import write_picture
from bench.screenshots.stages import Stage, stages
from bench.screenshots.world import World, world
from testing.chromium import chromium_path

LOOKS: dict[str, dict[str, Any]] = {
    "": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "-dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "-narrow": {"viewport": {"width": 390, "height": 800}, "color_scheme": "light"},
}
_ID = re.compile(r"\b[0-9a-f]{16,}\S*")
"""An id in a page's title, of which a heading would make an emoji."""
_TALLEST = 1400
_LONGEST = 15_000
_SETTLES = 400
"""Milliseconds that curves take to be drawn; parts that refresh themselves are never done."""
_HEAD = """# Screenshots

*Generated from the dashboard's routes by `make screenshots`: change it there.*

Every page of the dashboard: light, dark and narrow. The service is a real one, and its data was made through the SDK by three
made-up tenants.
"""


@dataclass(frozen=True)
class Side:
    """Pages of one listener, the way to log in there, and what is done on a page before its picture is taken."""

    title: str
    url: str
    templates: list[str]
    login: str
    label: str
    key: str
    stages: Mapping[str, Stage]


def main() -> None:
    """Run the service, walk the pages, and write pictures and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/screenshots"))
    out: Path = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, _running(Path(folder)) as served, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        sides = (
            Side("Tenants' pages", served.url, tenant_pages(), "/ui/login", "API key", served.key, stages(served)),
            Side(
                "Operators' pages",
                served.ops_url,
                operator_pages(),
                "/ops/login",
                "Operator's key",
                served.operator_key,
                {},
            ),
        )
        shown = {side.title: _walk(browser, side, out) for side in sides}
        browser.close()
    pages = {side.title: sorted(shown[side.title].values()) for side in sides}
    out.parent.joinpath("screenshots.md").write_text(_page(shown))
    missed = [one for side in sides for one in side.templates if one not in shown[side.title] and "{" in one]
    size = sum(path.stat().st_size for path in out.iterdir())
    print(
        json.dumps({"pages": {title: len(names) for title, names in pages.items()}, "bytes": size, "unreached": missed})
    )


@contextmanager
def _running(folder: Path) -> Iterator[World]:
    """Yield the world, made in a thread of its own: Playwright has an event loop in this one."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        made = world(folder)
        yield thread.submit(stack.enter_context, made).result()
        thread.submit(stack.close).result()


def _walk(browser: Browser, side: Side, out: Path) -> dict[str, str]:
    """Take pictures of the side's pages; return their titles by template."""
    contexts = {look: browser.new_context(base_url=side.url, **options) for look, options in LOOKS.items()}
    workbench = browser.new_context().new_page()
    titles: dict[str, str] = {}
    for look, context in contexts.items():
        page = context.new_page()
        page.set_default_timeout(_LONGEST)
        page.goto(side.login)
        titles[side.login] = page.title()
        _take(page, out / f"{name_of(side.login)}{look}.png", workbench)
        page.get_by_label(side.label).fill(side.key)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(lambda url: "login" not in url)
    links: list[str] = []
    left = [one for one in side.templates if one != side.login]
    while found := [(one, path) for one in left if (path := address(one, links)) is not None]:
        for template, path in found:
            left.remove(template)
            if is_page(contexts[""].pages[0], path):
                open_page = partial(_open, path, side.stages.get(template))
                titles[template] = _shoot(contexts, template, open_page, out, workbench, links)
    for context in contexts.values():
        context.close()
    return titles


def _open(path: str, stage: Stage | None, page: Page) -> None:
    page.goto(path)
    if stage is not None:
        stage(page)


def _shoot(
    contexts: dict[str, BrowserContext], template: str, open_page: Stage, out: Path, workbench: Page, links: list[str]
) -> str:
    """Take the page in every look, note its links, and return its title."""
    title = ""
    for look, context in contexts.items():
        page = context.pages[0]
        open_page(page)
        title = page.title()
        _take(page, out / f"{name_of(template)}{look}.png", workbench)
    hrefs: list[str] = page.eval_on_selector_all("a[href]", "(all) => all.map((one) => one.getAttribute('href'))")
    links += [one.partition("?")[0] for one in hrefs if one.startswith("/") and one not in links]
    return title


def _take(page: Page, path: Path, workbench: Page) -> None:
    """Take the page from its top, with its curves drawn, as high as it is and no higher than ``_TALLEST``."""
    page.wait_for_load_state("load")
    page.wait_for_timeout(_SETTLES)
    first = page.viewport_size
    assert first is not None
    # As high a window: what fills a window's height is as high as the page.
    height = min(int(page.evaluate("document.documentElement.scrollHeight")), _TALLEST)
    page.set_viewport_size({"width": first["width"], "height": height})
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(_SETTLES)
    write_picture(path, page.screenshot(animations="disabled"), workbench)
    page.set_viewport_size(first)


def _page(shown: dict[str, dict[str, str]]) -> str:
    parts = [_HEAD]
    for heading, titles in shown.items():
        parts.append(f"\n## {heading}\n")
        for template, title in sorted(titles.items()):
            name, what = name_of(template), _ID.sub("", title.partition(" · ")[0]).strip() or template
            parts.append(f"\n### {what}\n\n`{template}`\n\n![{what}, light](screenshots/{name}.png)\n")
            parts.append(f"\n![{what}, dark](screenshots/{name}-dark.png)\n")
            parts.append(f"\n![{what}, narrow](screenshots/{name}-narrow.png)\n")
    return "".join(parts)


if __name__ == "__main__":
    main()
