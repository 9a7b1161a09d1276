"""Pages in Chromium: when a step is on the screen, what the policy and axe find, what the console says."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from testing.chromium import chromium_path

_AXE = Path(__file__).parents[2] / "tests/ui/vendor/axe.min.js"
_WATCH = """
window.violations = 0;
document.addEventListener('securitypolicyviolation', () => { window.violations += 1; });
"""
_NOTE_DRAWN = """
() => {
  const curve = document.getElementById('curve');
  window.drawn = [];
  new MutationObserver(() => window.drawn.push([Number(curve.dataset.drawnStep), Date.now()]))
    .observe(curve, { attributeFilter: ['data-drawn-step'] });
}
"""
_SECONDS = 60.0


@dataclass(slots=True)
class Findings:
    """Problems that the pages were found with."""

    csp_violations: int = 0
    console_errors: int = 0
    axe_serious: int = 0
    told: list[str] = field(default_factory=list)


class OpenPages:
    """Pages of one browser that is logged in."""

    def __init__(self, browser: Browser, base_url: str, key: str) -> None:
        self.findings = Findings()
        self._context = browser.new_context(base_url=base_url)
        self._context.set_default_timeout(_SECONDS * 1000)
        self._context.add_init_script(_WATCH)
        self._context.on("console", lambda message: self._note(message.type, message.text))
        self._context.on("weberror", lambda error: self._note("error", str(error.error)))
        self._pages: list[Page] = []
        page = self._context.new_page()
        page.goto("/ui/login")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/ui")
        self._check(page)
        page.close()

    def open_run(self, run: str) -> None:
        """Open a run's page, and note when it draws a step."""
        page = self._context.new_page()
        page.goto(f"/ui/runs/{run}")
        page.locator("#curve[data-live=open]").wait_for()
        page.evaluate(_NOTE_DRAWN)
        self._pages.append(page)

    def drawn(self) -> list[list[tuple[int, float]]]:
        """Return for each run page the steps that were on its screen, with the seconds since 1970."""
        return [[(step, at / 1000) for step, at in page.evaluate("() => window.drawn")] for page in self._pages]

    def check_all(self, paths: list[str]) -> None:
        """Look for violations on the open pages and on ``paths``."""
        for page in self._pages:
            self._check(page)
        for path in paths:
            page = self._context.new_page()
            page.goto(path)
            page.wait_for_load_state("load")
            self._check(page)
            page.close()

    def close(self) -> None:
        """Close the pages."""
        self._context.close()

    def _check(self, page: Page) -> None:
        page.evaluate(_AXE.read_text())
        found = page.evaluate("async () => (await axe.run(document)).violations")
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        self.findings.axe_serious += len(serious)
        self.findings.csp_violations += page.evaluate("() => window.violations")
        self.findings.told += [f"{page.url}: {one['id']}" for one in serious]

    def _note(self, kind: str, text: str) -> None:
        if kind == "error":
            self.findings.console_errors += 1
            self.findings.told.append(text)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Debian's Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
