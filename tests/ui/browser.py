"""Pages of the dashboard in Chromium, watched: an error on the console or a violation of the policy fails their test."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Page, Playwright, expect

from testing.chromium import chromium_path

SECONDS = 40.0
_AXE = Path(__file__).with_name("vendor") / "axe.min.js"
_WATCH = """
document.addEventListener('securitypolicyviolation', (event) => {
  console.error('policy violated: ' + event.violatedDirective + ' ' + event.blockedURI + ' ' + event.sourceFile);
});
"""


def launched(playwright: Playwright) -> Browser:
    """Return a Chromium that reaches nothing but loopback."""
    return playwright.chromium.launch(
        executable_path=chromium_path(),
        args=["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"],
    )


@dataclass
class Watched:
    """Problems that the pages of a context have had. ``expected`` holds parts of texts that are no problem."""

    problems: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.problems.append(text)

    def check(self) -> None:
        """Fail for a problem that was not expected."""
        left = [one for one in self.problems if not any(part in one for part in self.expected)]
        assert left == [], "\n".join(left)


def _noted(watched: Watched, message: ConsoleMessage) -> None:
    if message.type == "error":
        watched.note(f"console of {message.location.get('url')}: {message.text}")


@contextmanager
def watched_context(browser: Browser, base_url: str, **options: object) -> Iterator[tuple[BrowserContext, Watched]]:
    """Open a browser's profile of its own, whose pages are watched until the context ends."""
    watched = Watched()
    context = browser.new_context(base_url=base_url, **options)  # type: ignore[arg-type]
    context.set_default_timeout(SECONDS * 1000)
    context.set_default_navigation_timeout(SECONDS * 1000)
    context.add_init_script(_WATCH)
    context.on("console", lambda message: _noted(watched, message))
    context.on("weberror", lambda error: watched.note(f"page error: {error.error}"))
    try:
        yield context, watched
    finally:
        context.close()
    watched.check()


def log_in(page: Page, key: str) -> None:
    """Log in with the key, as a person does."""
    page.goto("/ui/login")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/ui")


def expect_ended(page: Page, path: str) -> None:
    """Visit a page with a session that has ended. The open page may go to the login by itself just then."""
    try:
        page.goto(path)
    except Error as error:
        if not any(told in str(error) for told in ("interrupted by another navigation", "net::ERR_ABORTED")):
            raise
    expect(page.get_by_label("API key")).to_be_visible()


def read_anew(page: Page, part: str, times: int = 2) -> None:
    """Wait until a part that refreshes itself has come anew so many times."""
    for _ in range(times):
        page.locator(f"{part} *").first.evaluate("(one) => one.setAttribute('data-old', '')")
        expect(page.locator(f"{part} [data-old]")).to_have_count(0)


@cache
def _axe() -> str:
    return _AXE.read_text()


def check_accessible(page: Page) -> None:
    """Fail for a serious or critical finding of axe on the page."""
    page.evaluate(_axe())
    found = page.evaluate("async () => (await axe.run(document)).violations")
    bad = [
        f"{one['impact']} {one['id']}: {one['help']}\n  " + "\n  ".join(map(_told, one["nodes"][:5]))
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
    assert bad == [], f"{page.url}\n" + "\n".join(bad)


def _told(node: dict[str, str]) -> str:
    return f"{node['html'][:200]} {node['failureSummary'][:300]}"
