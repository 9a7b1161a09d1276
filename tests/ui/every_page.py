"""Every page of a listener, as its routes name them: those to open, and those that answer a form."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from playwright.sync_api import Page, expect

from bench.screenshots.pages import address, is_page
from tests.api.audited_pages import Change
from tests.ui.browser import check_accessible
from tests.ui.keyboard import check_reachable

NARROW, WIDE = {"width": 390, "height": 800}, {"width": 1280, "height": 720}
_HREFS = "(all) => all.map((one) => one.getAttribute('href'))"
_FORM = "main *, form *"
_SHAPE = "(all) => document.title + all.map((one) => `${one.tagName}.${one.className}`).join()"
_SUBMIT = """([path, fields]) => {
  const form = document.createElement("form");
  Object.assign(form, { method: "post", action: path });
  for (const [name, value] of Object.entries(fields)) {
    const input = document.createElement("input");
    Object.assign(input, { type: "hidden", name, value });
    form.append(input);
  }
  document.body.append(form);
  HTMLFormElement.prototype.submit.call(form);
}"""


@dataclass
class Inspection:
    """Looks at pages in one browser. ``seen`` are the addresses that were looked at.

    A page of the same title and elements as one before, as most errors are, is looked at once.
    """

    page: Page
    seen: dict[str, str] = field(default_factory=dict)
    """Address of each page by its template, or by the path of its form."""
    _shapes: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Check the open page: by keyboard and in light colours on a wide screen, in dark ones on a narrow screen."""
        page = self.page
        shape = page.eval_on_selector_all(_FORM, _SHAPE)
        if shape in self._shapes:
            return
        self._shapes.add(shape)
        # The page as it is now: what its live parts leave out next is not in any reader's way.
        page.evaluate("document.addEventListener('htmx:beforeSwap', (event) => (event.detail.shouldSwap = false))")
        expect(page.locator("h1"), page.url).to_have_count(1)
        expect(page.locator("th:empty"), page.url).to_have_count(0)
        check_accessible(page)
        check_reachable(page)
        # Without motion: colours that are on their way to dark ones are none of the page's.
        page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        page.set_viewport_size(NARROW)
        page.wait_for_function(f"document.documentElement.scrollWidth <= {NARROW['width']}")
        check_accessible(page)
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(WIDE)

    def walk(self, templates: Iterable[str]) -> None:
        """Look at the page of every template; fail for one whose address no page before it leads to."""
        links: list[str] = []
        left = list(templates)
        while found := [(one, path) for one in left if (path := self._address(one, links)) is not None]:
            for template, path in found:
                left.remove(template)
                if not is_page(self.page, path):
                    continue
                self.page.goto(path)
                self.seen[template] = path
                entry = self.page.locator(f'nav a[href="{path}"]')
                if entry.count():
                    expect(entry).to_have_attribute("aria-current", "page")
                self.look()
                hrefs = [href.partition("?")[0] for href in self.page.eval_on_selector_all("a[href]", _HREFS)]
                links += [one for one in hrefs if one.startswith("/") and one not in links]
        assert left == [], f"nothing leads to {left}, so that nobody has looked at them"

    def _address(self, template: str, links: list[str]) -> str | None:
        """Return the template's address: a link, or what stands below the address of a page that was seen."""
        above = [one for one in self.seen if template.startswith(f"{one}/") and "{" in one]
        below = [self.seen[one] + template[len(one) :] for one in above if "{" not in template[len(one) :]]
        return address(template, links) or next(iter(below), None)

    def send(self, path: str, fields: Mapping[str, str]) -> None:
        """Send a form and look at its answer, unless that leads to another page."""
        with self.page.expect_navigation() as answered:
            self.page.evaluate(_SUBMIT, [path, dict(fields)])
        self.seen[path] = self.page.url
        if answered.value.request.redirected_from is None:
            self.look()


def made_up(path: str) -> str:
    """Return the path with ids of nothing."""
    return filled(path, {})


def filled(text: str, ids: Mapping[str, str]) -> str:
    """Return the text with ids for its parameters; those that have none get one of nothing."""
    for name, value in ids.items():
        text = text.replace(f"{{{name}}}", value)
    while "{" in text:
        text = text[: text.index("{")] + "1" + text[text.index("}") + 1 :]
    return text


def filled_forms(changes: Iterable[Change], ids: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield path and fields of each form. ``ids`` may change in between."""
    for change in changes:
        yield filled(change.path, ids), {filled(name, ids): filled(one, ids) for name, one in change.form.items()}
