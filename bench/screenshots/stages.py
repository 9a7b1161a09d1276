"""Pages that show something only once a person has worked on them, and that work."""

from collections.abc import Callable, Mapping

from playwright.sync_api import Page, expect

from bench.screenshots.world import World

Stage = Callable[[Page], None]
_SECONDS = 120.0
_BEFORE = 40
"""Tokens that the first version makes, at least."""


def stages(world: World) -> Mapping[str, Stage]:
    """Return what is done on pages, by their templates, before their pictures are taken."""
    return {"/ui/playground": lambda page: _play(page, world)}


def _play(page: Page, world: World) -> None:
    """Draw a sample that is paused while another version is published and loaded, so that two versions make it."""
    page.goto(f"/ui/playground?model={world.run}")
    page.locator("body[data-playground=ready]").wait_for()
    page.get_by_label("Text", exact=True).fill("The quick brown fox ")
    page.get_by_label("Max tokens").fill("400")
    page.get_by_role("button", name="Sample", exact=True).click()
    pane = page.locator("#pane0")
    pane.locator(f"#pane0-t{_BEFORE}").wait_for(state="attached", timeout=_SECONDS * 1000)
    pane.get_by_role("button", name="Pause").click()
    expect(pane).to_have_attribute("data-state", "paused", timeout=_SECONDS * 1000)
    world.publish()
    pane.get_by_role("button", name="Resume").click()
    expect(pane).to_have_attribute("data-state", "done", timeout=_SECONDS * 1000)
    pane.locator(".tok.v1").first.hover()
