"""A run's page in a browser: its curve grows with the SDK's own losses, over killed services, and stays small."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import insert, select, update

from store.clock import utc_now
from store.database import Database
from store.tables import Run, RunPoint
from tenants.run_points import LossPer
from testing.service_process import ServiceProcess
from tests.e2e.conftest import BASE_NAME, make_key, make_tenant
from tests.e2e.raw_client import RawClient
from tests.ui.browser import SECONDS, log_in, watched_context
from tests.ui.stepping import stepping
from tests.ui.stored import write_rows

MOST_SENT = 2000


def points_of(page: Page) -> dict[int, float]:
    """Return the points that the page draws, from its own answer of the curve."""
    told = page.evaluate("async () => (await fetch(document.getElementById('curve').dataset.url + '/curve')).json()")
    return dict(zip(told["step"], told["value"], strict=True))


def expect_points(page: Page, count: int) -> None:
    expect(page.locator("#curve")).to_have_attribute("data-points", str(count), timeout=SECONDS * 1000)


def test_a_curve_grows_by_a_point_a_step_with_the_sdks_losses(browse, axe, ui_service) -> None:
    page = browse(ui_service.cats)
    with (
        stepping(ui_service.url, ui_service.cats.key) as client,
        stepping(ui_service.url, ui_service.dogs.key) as other,
    ):
        page.goto(f"/ui/runs/{client.run}")
        expect(page.get_by_text("No optimizer step yet")).to_be_visible()
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        for number in range(1, 6):
            client.step()
            other.step()
            expect_points(page, number)
            shown = float(page.locator("#curve").get_attribute("data-last-loss") or "nan")
            assert shown == pytest.approx(client.means[-1], abs=1e-6)
        client.save()
        client.step()
        expect(page.locator('#marks tr[data-kind="publication"]')).to_have_count(1)
        expect(page.locator("#points tbody tr")).to_have_count(6)
        assert points_of(page) == pytest.approx(dict(enumerate(client.means, 1)), abs=1e-6)
        csv = page.request.get(f"/ui/runs/{client.run}/points.csv").text().splitlines()
        assert [float(line.split(",")[2]) for line in csv[1:]] == pytest.approx(client.means, abs=1e-6)
        axe(page)
        for path in ("", "/curve", "/events", "/points.csv"):
            assert page.request.get(f"/ui/runs/{other.run}{path}").status == 404
        assert "onerror" not in str(page.evaluate("() => [...document.images].map((one) => one.outerHTML)"))


def test_a_run_that_waits_tells_why_until_it_goes_on_and_a_pause_leaves_marks(browse, axe, ui_service) -> None:
    with (
        closing(RawClient(ui_service.url, ui_service.cats.key)) as client,
        closing(RawClient(ui_service.url, ui_service.dogs.key)) as other,
    ):
        run, theirs = client.model(BASE_NAME), other.model(BASE_NAME)
        page = browse(ui_service.cats)
        page.goto(f"/ui/runs/{run}")
        waiting = page.locator("#waiting")
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        expect(waiting).to_be_hidden()
        late = client.step(run, 2)
        expect(waiting).to_be_visible()
        expect(waiting).to_have_attribute("data-reason", "missing_seq_id")
        expect(waiting.locator("[data-field=reason]")).to_have_text("an earlier request is missing")
        expect(waiting.locator("[data-field=text]")).to_contain_text("seq_id 1")
        expect(waiting.locator("[data-field=since]")).to_be_visible()
        axe(page)
        # Another tenant's run goes on, and has nothing to tell.
        other.result(other.step(theirs, 1))
        beside = browse(ui_service.dogs)
        beside.goto(f"/ui/runs/{theirs}")
        expect(beside.locator("#waiting")).to_be_hidden()
        client.result(client.step(run, 1))
        client.result(late)
        expect(waiting).to_be_hidden()
        for action, kind in (("pause", "paused"), ("resume", "resumed")):
            assert client.post(f"/adapters/{run}/{action}").status_code == 200
            expect(page.locator(f'#marks tr[data-kind="{kind}"]')).to_have_count(1)
        expect(beside.locator("#marks tr[data-kind=paused]")).to_have_count(0)


def test_the_moving_average_is_that_of_the_points_with_the_weight_that_was_chosen(browse, ui_service) -> None:
    page = browse(ui_service.cats)
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step(5)
        page.goto(f"/ui/runs/{client.run}")
        expect_points(page, 5)
        for weight in ("0.9", "0.6"):
            page.locator("#weight").select_option(weight)
            keep, total, weights = float(weight), 0.0, 0.0
            for mean in client.means:
                total, weights = keep * total + (1 - keep) * mean, keep * weights + 1 - keep
            plot = page.locator("#loss-plot .u-over")
            width = (plot.bounding_box() or {"width": 0})["width"]
            plot.hover(position={"x": width - 2, "y": 20})
            expect(page.locator("[data-say=step]")).to_have_text("5")
            shown = float(page.locator("[data-say=average]").inner_text())
            assert shown == pytest.approx(total / weights, rel=1e-3)


@pytest.fixture
def own_service(tmp_path: Path, tiny_model_dir: Path) -> Iterator[tuple[ServiceProcess, str, str]]:
    """A service that the test may kill, on a port that stays, with keys of two tenants."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    data = tmp_path / "data"
    with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={tiny_model_dir}"], port=port) as process:
        keys = []
        for name in ("cats", "dogs"):
            make_tenant(data, name)
            keys.append(make_key(data, name, role="admin"))
        yield process, *keys


def test_a_curve_has_no_gap_and_no_point_twice_over_a_killed_and_a_stopped_service(own_service, chromium) -> None:
    """The service computes, too: its end is that of the API and of the trainer."""
    process, cats, dogs = own_service
    with (
        watched_context(chromium, process.base_url) as (context, watched),
        stepping(process.base_url, cats) as client,
        stepping(process.base_url, dogs) as other,
    ):
        # The browser and htmx note each request that fails, whatever the page does.
        watched.expected += ["net::ERR", "Failed to load resource", "htmx:sendError", "htmx:afterRequest"]
        page, front = context.new_page(), context.new_page()
        log_in(page, cats)
        front.goto("/ui")
        client.step(3)
        other.step(2)
        page.goto(f"/ui/runs/{client.run}")
        expect_points(page, 3)
        expect(page.locator("#curve")).to_have_attribute("data-live", "open")
        process.kill()
        expect(page.locator("#curve")).to_have_attribute("data-live", "closed")
        for one in (page, front):
            expect(one.get_by_text("The service does not answer")).to_be_visible()
        client.begin_step()
        process.start()
        client.end_step()
        for one in (page, front):
            expect(one.get_by_text("The service does not answer")).to_be_hidden()
        expect(front.locator(f'tr[data-run="{client.run}"] td.number').first).to_have_text("4")
        assert process.stop() == 0, "an open stream keeps the service from no orderly end"
        expect(page.locator("#curve")).to_have_attribute("data-live", "closed")
        process.start()
        client.step(2)
        other.step()
        expect_points(page, 6)
        expect(page.locator("#curve")).to_have_attribute("data-last-step", "6")
        rows = page.locator("#points tbody tr td:first-child").all_inner_texts()
        assert rows == [str(step) for step in range(6, 0, -1)]
        assert points_of(page) == pytest.approx(dict(enumerate(client.means, 1)), abs=1e-6)
        lost = page.locator('#marks tr[data-kind="trainer_lost"], #marks tr[data-kind="replayed"]')
        expect(lost.first).to_be_attached(timeout=SECONDS * 1000)
        told = httpx.get(
            f"{process.base_url}/api/weft/v1/runs/{other.run}/points", headers={"X-API-Key": dogs}, timeout=40
        ).json()
        assert [one["mean_loss"] for one in told["points"]] == pytest.approx(other.means, abs=1e-6)


def lengthen(data: Path, run: str, count: int) -> None:
    """Give the run points up to ``count``, one a second, with a single spike."""

    async def write(database: Database) -> None:
        begin = utc_now() - timedelta(seconds=count)
        async with database.read() as session:
            tenant = (await session.scalars(select(Run.tenant_id).where(Run.id == run))).one()
            first = (await session.scalars(select(Run.optimizer_steps).where(Run.id == run))).one() + 1
        for at in range(first, count + 1, 20_000):
            rows = [
                {
                    "run_id": run,
                    "step": step,
                    "tenant_id": tenant,
                    "at": begin + timedelta(seconds=step),
                    "loss_sum": 5000.0 if step == 123_456 else 100.0 / step**0.5,
                    "loss_weight": 10.0,
                    "loss_per": LossPer.WEIGHT,
                    "tokens": 10,
                    "sampling_kl_sum": 0.0,
                    "sampled_tokens": 0,
                    "learning_rate": 1e-4,
                    "grad_norm": 1.0,
                    "adapter_step": step,
                }
                for step in range(at, min(at + 20_000, count + 1))
            ]
            async with database.write() as transaction:
                await transaction.execute(insert(RunPoint), rows)
        async with database.write() as transaction:
            await transaction.execute(update(Run).where(Run.id == run).values(optimizer_steps=count))

    write_rows(data, write)


def test_a_curve_of_two_hundred_thousand_points_is_sent_as_two_thousand(browse, ui_service) -> None:
    page = browse(ui_service.cats)
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step()
        lengthen(ui_service.data, client.run, 200_000)
        sent: list[int] = []
        page.on("response", lambda answer: sent.append(len(answer.json()["step"])) if "/curve" in answer.url else None)
        page.goto(f"/ui/runs/{client.run}")
        expect_points(page, 200_000)
        drawn = int(page.locator("#curve").get_attribute("data-shown") or 0)
        assert 500 < drawn <= MOST_SENT
        assert 500.0 in points_of(page).values()
        client.step()
        expect_points(page, 200_001)
        page.locator("#scale").select_option("log")
        page.locator("#series").select_option("grad_norm")
        expect(page.locator("#curve")).to_have_attribute("data-drawn-step", "200001")
        assert max(sent) <= MOST_SENT


def test_a_part_of_a_long_curve_is_looked_at_step_by_step_and_stays_while_points_come(browse, ui_service) -> None:
    page, other = browse(ui_service.cats), browse(ui_service.dogs)
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step()
        lengthen(ui_service.data, client.run, 200_000)
        page.goto(f"/ui/runs/{client.run}")
        curve = page.locator("#curve")
        expect_points(page, 200_000)
        expect(curve).to_have_attribute("data-width", "256")
        page.get_by_label("Steps from").fill("123000")
        page.get_by_label("to", exact=True).fill("123800")
        page.get_by_label("to", exact=True).press("Enter")
        expect(curve).to_have_attribute("data-width", "1")
        expect(curve).to_have_attribute("data-live", "open")
        client.step()
        expect(curve).to_have_attribute("data-drawn-step", "200001")
        expect(curve).to_have_attribute("data-part", "123000-123800")
        expect(curve).to_have_attribute("data-width", "1")
        page.get_by_role("button", name="Whole curve").click()
        expect(curve).to_have_attribute("data-part", "")
        expect(curve).to_have_attribute("data-width", "256")
        box = page.locator("#loss-plot .u-over").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.502 * box["width"], box["y"] + 20, steps=3)
        page.mouse.move(box["x"] + 0.51 * box["width"], box["y"] + 20, steps=3)
        page.mouse.up()
        expect(curve).to_have_attribute("data-part", re.compile(r"^(99|10[0-3])\d{3}-10[0-3]\d{3}$"))
        expect(curve).not_to_have_attribute("data-width", "256")
        page.locator("#loss-plot .u-over").dblclick()
        expect(curve).to_have_attribute("data-part", "")
        part = f"/ui/runs/{client.run}/curve?begin=1&end=2"
        assert [one.request.get(part).status for one in (page, other)] == [200, 404]


def test_what_a_script_reads_is_in_the_page_without_one(browse, ui_service) -> None:
    with stepping(ui_service.url, ui_service.cats.key) as client:
        client.step(2)
        page = browse(ui_service.cats, java_script_enabled=False)
        page.goto(f"/ui/runs/{client.run}")
        expect(page.locator("#points tbody tr")).to_have_count(2)
        expect(page.get_by_text(re.compile(r"<img src=x onerror=alert\(1\)>⟨U\+202E⟩"))).to_be_visible()
        assert json.loads(page.request.get(f"/ui/runs/{client.run}/curve").text())["points"] == 2
