"""The loss functions of a run's steps are on its page, live, when it is loaded and without a script, and in its file."""

import csv
from contextlib import closing

from playwright.sync_api import Page, expect

from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient, pass_message
from tests.ui.test_run_curve import expect_points

TOKENS = [1, 2, 3]
POLICY_INPUTS = {"logprobs": [-1.0] * len(TOKENS), "advantages": [0.5] * len(TOKENS)}
MIXED = ("ppo", "cross_entropy", "ppo")


def step(client: RawClient, run: str, seq_id: int, *losses: str) -> int:
    """Have a step with a pass of each loss done; return the next seq_id."""
    for number, loss in enumerate(losses):
        inputs = {} if loss == "cross_entropy" else POLICY_INPUTS
        client.result(client.passes(pass_message(run, seq_id + number, TOKENS, loss=loss, **inputs)))
    client.result(client.step(run, seq_id + len(losses)))
    return seq_id + len(losses) + 1


def losses_of(page: Page) -> list[str]:
    """Return the table's cells of loss functions, newest first."""
    titles = page.locator("#points th").all_inner_texts()
    place = titles.index("Loss function") + 1
    return page.locator(f"#points tbody td:nth-child({place})").all_inner_texts()


def test_a_page_tells_the_loss_functions_of_each_step_in_their_order(browse, axe, ui_service) -> None:
    with (
        closing(RawClient(ui_service.url, ui_service.cats.key)) as client,
        closing(RawClient(ui_service.url, ui_service.dogs.key)) as other,
    ):
        run, theirs = client.model(BASE_NAME), other.model(BASE_NAME)
        page, beside = browse(ui_service.cats), browse(ui_service.dogs)
        setting = page.locator("[data-figure=loss-functions]")
        for one, shown in ((page, run), (beside, theirs)):
            one.goto(f"/ui/runs/{shown}")
            expect(one.locator("#curve")).to_have_attribute("data-live", "open")
        expect(setting).to_be_hidden()
        following = step(client, run, 1, *MIXED)
        step(other, theirs, 1, "importance_sampling")
        expect(setting).to_have_text("ppo, cross_entropy")
        assert losses_of(page) == ["ppo, cross_entropy"]
        # Its losses are divided by different things, of which no one is the mean's.
        expect(page.locator("#points caption")).to_have_text("The last 1 point, newest first")
        following = step(client, run, following)
        step(client, run, following, "cross_entropy")
        expect_points(page, 3)
        expect(page.locator("#points [data-loss-per]")).to_have_text("; the loss is divided by each weight")
        told = ["cross_entropy", "–", "ppo, cross_entropy"]
        assert losses_of(page) == told
        plain = browse(ui_service.cats, java_script_enabled=False)
        for one in (page, plain):
            one.goto(f"/ui/runs/{run}")
            assert losses_of(one) == told
            expect(one.locator("[data-figure=loss-functions]")).to_have_text("cross_entropy")
        axe(page)
        lines = list(csv.DictReader(page.request.get(f"/ui/runs/{run}/points.csv").text().splitlines()))
        assert [line["loss_fns"] for line in lines] == ["ppo,cross_entropy", "", "cross_entropy"]
        expect(beside.locator("[data-figure=loss-functions]")).to_have_text("importance_sampling")
        assert losses_of(beside) == ["importance_sampling"]
