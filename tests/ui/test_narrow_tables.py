"""Wide tables on narrow screens: the navigation leaves them the width, and a soft edge tells that there is more aside."""

import base64

import pytest
from playwright.sync_api import Page, expect

from tests.ui.stepping import stepping

PIXELS = """
async (told) => {
  const image = new Image();
  image.src = "data:image/png;base64," + told;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  const sums = [];
  for (let at = 0; at < data.length; at += 4) sums.push(data[at] + data[at + 1] + data[at + 2]);
  return sums.sort((one, other) => one - other)[Math.floor(sums.length / 2)];
}
"""
"""The middle one of a picture's brightnesses: texts and lines are less than half of it."""


def brightness(page: Page, inside: int) -> int:
    """Return the brightness of the table along its edge; ``inside``: pixels from the left one, or from the right if negative."""
    box = page.locator(".table-wrap").first.bounding_box()
    assert box is not None
    x = box["x"] + inside if inside > 0 else box["x"] + box["width"] + inside - 2
    picture = page.screenshot(clip={"x": x, "y": box["y"] + 1, "width": 2, "height": box["height"] - 2})
    return int(page.evaluate(PIXELS, base64.b64encode(picture).decode()))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_that_scrolls_sideways_has_a_shadow_where_there_is_more(browse, axe, ui_service, scheme) -> None:
    page, beside = (
        browse(ui_service.cats, color_scheme=scheme, viewport={"width": width, "height": 900}) for width in (420, 1280)
    )
    with stepping(ui_service.url, ui_service.cats.key):
        for one in (page, beside):
            one.goto("/ui/runs")
            one.mouse.move(1, 1)
        wrap = page.locator(".table-wrap").first
        assert wrap.evaluate("(one) => one.scrollWidth > one.clientWidth + 60")
        panel = brightness(beside, 4)
        assert (brightness(beside, -4), brightness(page, 4)) == (panel, panel)
        assert brightness(page, -4) < panel - 20
        wrap.evaluate("(one) => (one.scrollLeft = one.scrollWidth)")
        assert brightness(page, 4) < panel - 20
        assert brightness(page, -4) == panel
        axe(page)


@pytest.mark.parametrize("path", ["/ui/runs", "/ui/samples", "/ui/audit", "/ui/keys"])
def test_below_a_thousand_pixels_the_navigation_is_above_the_page(browse, ui_service, path) -> None:
    page = browse(ui_service.cats)
    for width in (820, 1000):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(path)
        side, main = page.locator(".side").bounding_box(), page.locator("main").bounding_box()
        assert side is not None
        assert main is not None
        assert side["y"] + side["height"] <= main["y"]
        assert (side["width"], main["width"]) == (width, width)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        expect(page.locator(".side [aria-current]")).to_be_in_viewport()
    page.set_viewport_size({"width": 1280, "height": 900})
    main = page.locator("main").bounding_box()
    assert main is not None
    assert main["x"] == 216
