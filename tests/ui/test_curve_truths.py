"""A curve tells no more and no less than the run's steps: a point that comes twice is one, a loss that is no number is a gap."""

import json
from datetime import timedelta
from pathlib import Path

import httpx
from playwright.sync_api import Page, Route, expect
from sqlalchemy import insert, select, update

from store.clock import utc_now
from store.database import Database
from store.tables import Run, RunPoint
from tenants.run_points import LossPer
from tests.ui.browser import SECONDS
from tests.ui.stepping import stepping
from tests.ui.stored import write_rows
from tests.ui.test_run_curve import expect_points, points_of

STEPS = 5
BROKEN = 3
PIXELS = """
([name, from, to, height]) => {
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const wanted = [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const canvas = document.querySelector("#loss-plot canvas");
  const over = document.querySelector("#loss-plot .u-over").getBoundingClientRect();
  const whole = canvas.getBoundingClientRect();
  const scale = canvas.width / whole.width;
  const left = (over.left - whole.left + from * over.width) * scale;
  const right = (over.left - whole.left + to * over.width) * scale;
  const bottom = (over.bottom - whole.top) * scale;
  const top = bottom - height * over.height * scale;
  const { data } = canvas.getContext("2d").getImageData(left, top, right - left, bottom - top);
  let found = 0;
  for (let at = 0; at < data.length; at += 4)
    if (wanted.every((value, part) => Math.abs(data[at + part] - value) < 60)) found += 1;
  return found;
}
"""
"""Pixels of about a colour in a part of the plot: between two parts of its width, and so much of its height from below."""


def pixels(page: Page, name: str, begin: float, end: float, height: float = 1) -> int:
    """Count pixels of about the colour ``name`` between two steps of a curve of ``STEPS``."""
    part = [name, (begin - 1) / (STEPS - 1), (end - 1) / (STEPS - 1), height]
    return int(page.evaluate(PIXELS, part))


def break_loss(data: Path, run: str) -> None:
    """Give a run of two steps three more, the first of which has a loss that is not finite."""

    async def write(database: Database) -> None:
        async with database.read() as session:
            tenant = (await session.scalars(select(Run.tenant_id).where(Run.id == run))).one()
        rows = [
            {
                "run_id": run,
                "step": step,
                "tenant_id": tenant,
                "at": utc_now() + timedelta(milliseconds=step),
                "loss_sum": None if step == BROKEN else 40.0,
                "loss_weight": 10.0,
                "loss_per": LossPer.WEIGHT,
                "tokens": 10,
                "sampling_kl_sum": 0.0,
                "sampled_tokens": 0,
                "learning_rate": 1e-4,
                "grad_norm": 1.0,
                "adapter_step": step,
            }
            for step in range(BROKEN, STEPS + 1)
        ]
        async with database.write() as transaction:
            await transaction.execute(insert(RunPoint), rows)
            await transaction.execute(update(Run).where(Run.id == run).values(optimizer_steps=STEPS))

    write_rows(data, write)


def check_gap(page: Page) -> None:
    """Assert that the step without a loss is a gap with a cross, and told as what it is."""
    expect_points(page, STEPS)
    expect(page.locator("#curve")).to_have_attribute("data-drawn-step", str(STEPS))
    assert points_of(page)[BROKEN] is None
    page.locator("#show-marks").uncheck()
    page.mouse.move(0, 0)
    page.wait_for_function(f"(part) => ({PIXELS})(part) > 0", arg=["--mark-broken", 0.45, 0.55, 0.1])
    for begin, end in ((1.2, 2.8), (3.2, 4.8)):
        assert pixels(page, "--mark-broken", begin, end) == 0
    assert pixels(page, "--curve-1", BROKEN - 0.8, BROKEN + 0.8) == 0, "a line leads over the gap"
    assert pixels(page, "--curve-1", 1.1, 1.9) > 0
    assert pixels(page, "--curve-1", 4.1, 4.9) > 0
    plot = page.locator("#loss-plot .u-over")
    width = (plot.bounding_box() or {"width": 0})["width"]
    plot.hover(position={"x": width / 2, "y": 20})
    expect(page.locator("[data-say=step]")).to_have_text(str(BROKEN))
    expect(page.locator("[data-say=loss]")).to_have_text("not finite")
    plot.hover(position={"x": width - 2, "y": 20})
    expect(page.locator("[data-say=loss]")).to_have_text("4")


def test_a_loss_that_is_not_finite_is_a_gap_and_a_cross_live_and_when_it_is_read_again(browse, ui_service) -> None:
    page, beside = browse(ui_service.cats), browse(ui_service.dogs)
    with (
        stepping(ui_service.url, ui_service.cats.key) as client,
        stepping(ui_service.url, ui_service.dogs.key) as other,
    ):
        client.step(2)
        other.step(STEPS)
        for one, run in ((page, client.run), (beside, other.run)):
            one.goto(f"/ui/runs/{run}")
            expect(one.locator("#curve")).to_have_attribute("data-live", "open")
        break_loss(ui_service.data, client.run)
        check_gap(page)
        row = page.locator("#points tbody tr", has=page.locator(f"td:first-child:text-is('{BROKEN}')"))
        expect(row.locator("td").nth(1)).to_have_text("–")
        page.reload()
        check_gap(page)
        lines = page.request.get(f"/ui/runs/{client.run}/points.csv").text().splitlines()
        assert [line.split(",")[2] != "" for line in lines[1:]] == [step != BROKEN for step in range(1, STEPS + 1)]
        expect_points(beside, STEPS)
        beside.locator("#show-marks").uncheck()
        assert pixels(beside, "--mark-broken", 1, STEPS) == 0
        assert pixels(beside, "--curve-1", 2.2, 3.8) > 0


def test_points_that_a_stream_sends_again_are_drawn_once(browse, ui_service) -> None:
    """The service leaves out what a page has seen; a page does not count on it."""
    page = browse(ui_service.cats)
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step(3)
        headers = {"X-API-Key": ui_service.cats.key}
        route = f"{ui_service.url}/api/weft/v1/runs/{client.run}/points"
        points = httpx.get(route, headers=headers, timeout=40).json()["points"]
        later = {**points[-1], "step": 4, "mean_loss": 1.5}
        told = [points, points, [*points, later], [later]]
        body = "".join(f"id: 4\nevent: points\ndata: {json.dumps(one)}\n\n" for one in told)

        def answer(asked: Route) -> None:
            asked.fulfill(body=f"retry: 600000\n\n{body}", content_type="text/event-stream")

        page.route("**/events?*", answer)
        page.goto(f"/ui/runs/{client.run}")
        expect(page.locator("#curve")).to_have_attribute("data-drawn-step", "4", timeout=SECONDS * 1000)
        expect_points(page, 4)
        expect(page.locator("#curve")).to_have_attribute("data-shown", "4")
        rows = page.locator("#points tbody tr td:first-child").all_inner_texts()
        assert rows == ["4", "3", "2", "1"]
        expect(page.locator("[data-figure=steps]")).to_have_text("4")
