"""Marks of a run's curve: each is drawn at its step in its colour, told where one points at it, and a row of the table."""

from contextlib import closing
from pathlib import Path

import httpx
from playwright.sync_api import Page, expect

from store.clock import utc_now
from store.database import Database
from tenants.run_history import RunEventKind, note_run_events
from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient
from tests.ui.stored import write_rows
from tests.ui.test_curve_truths import pixels
from tests.ui.test_run_curve import expect_points

CHECKPOINT, PUBLICATION = "--mark-checkpoint", "--mark-publication"
PAUSED, TRAINER = "--mark-paused", "--mark-trainer"
SHOWN = {
    "checkpoint": (1, CHECKPOINT, "Saved half-way"),
    "publication": (2, PUBLICATION, "Published evening"),
    "moved": (2, TRAINER, "The run moved to another trainer"),
    "replayed": (3, TRAINER, "The adapter was rebuilt, and operations replayed: 3 operations"),
    "paused": (4, PAUSED, "Sampling was paused: a look"),
    "resumed": (5, PAUSED, "Sampling was resumed"),
}
"""Step, colour and text of each mark that the test makes."""


def happen(data: Path, run: str, kind: RunEventKind, detail: str | None) -> None:
    """Write an event of the run's history as a trainer does."""

    async def write(database: Database) -> None:
        async with database.write() as transaction:
            await note_run_events(transaction, [run], kind, trainer="trainer-7", now=utc_now(), detail=detail)

    write_rows(data, write)


def lived(data: Path, client: RawClient, run: str) -> None:
    """Have a run of five steps live through everything that leaves a mark of ``SHOWN``."""

    def step(number: int, seq_id: int) -> None:
        client.result(client.step(run, seq_id, learning_rate=1e-3))
        assert len(client.points(run)) == number

    step(1, 1)
    client.result(client.post("/save_weights", model_id=run, path="half-way", seq_id=2))
    step(2, 3)
    client.result(client.post("/save_weights_for_sampler", model_id=run, path="evening", seq_id=4))
    happen(data, run, RunEventKind.MOVED, "by an operator, who is named to nobody")
    step(3, 5)
    happen(data, run, RunEventKind.REPLAYED, "3 operations")
    step(4, 6)
    assert client.post(f"/adapters/{run}/pause", reason="a look").status_code == 200
    step(5, 7)
    assert client.post(f"/adapters/{run}/resume").status_code == 200


def check_marks(page: Page) -> None:
    """Assert that the marks of ``SHOWN`` are in the table, on the curve and in words beside it."""
    plot = page.locator("#loss-plot .u-over")
    for kind, (step, colour, text) in SHOWN.items():
        row = page.locator(f'#marks tr[data-kind="{kind}"]')
        expect(row).to_have_count(1)
        expect(row.locator("td").first).to_have_text(str(step))
        expect(row.locator("td").nth(1)).to_have_text(text)
        page.mouse.move(0, 0)
        assert pixels(page, colour, max(step - 0.1, 1), min(step + 0.1, 5)) > 0, f"{kind} is not drawn at its step"
        box = plot.bounding_box() or {"width": 0.0}
        plot.hover(position={"x": min(max((step - 1) / 4 * box["width"], 1), box["width"] - 2), "y": 20})
        expect(page.locator("[data-say=step]")).to_have_text(str(step))
        expect(page.locator("[data-say=mark]")).to_contain_text(text)


def test_each_mark_is_drawn_told_and_a_row_live_and_when_it_is_read_again(browse, axe, ui_service) -> None:
    with (
        closing(RawClient(ui_service.url, ui_service.cats.key)) as client,
        closing(RawClient(ui_service.url, ui_service.dogs.key)) as other,
    ):
        run, theirs = client.model(BASE_NAME), other.model(BASE_NAME)
        other.result(other.step(theirs, 1))
        page, beside = browse(ui_service.cats), browse(ui_service.dogs)
        for one, shown in ((page, run), (beside, theirs)):
            one.goto(f"/ui/runs/{shown}")
            expect(one.locator("#curve")).to_have_attribute("data-live", "open")
        lived(ui_service.data, client, run)
        address = f"{ui_service.url}/api/weft/v1/runs/{run}/marks"
        told = httpx.get(address, headers={"X-API-Key": ui_service.cats.key}, timeout=40).raise_for_status().json()
        rows = [[str(one["step"]), one["text"]] for one in reversed(told["marks"])]
        for visit in ("live", "read again"):
            expect_points(page, 5)
            expect(page.locator("#curve")).to_have_attribute("data-marks", str(len(rows)))
            check_marks(page)
            if visit == "live":
                page.reload()
        assert "who is named to nobody" not in page.content()
        assert rows == page.locator("#marks tbody tr").evaluate_all(
            "all => all.map((row) => [...row.cells].slice(0, 2).map((cell) => cell.textContent))"
        )
        axe(page)
        page.locator("#show-marks").uncheck()
        page.mouse.move(0, 0)
        for colour in (CHECKPOINT, PAUSED, TRAINER):
            assert pixels(page, colour, 1, 5) == 0, "a mark is drawn though none is to be"
        expect(beside.locator("#marks tbody")).not_to_contain_text("half-way")
        assert pixels(beside, CHECKPOINT, 1, 5) == 0
