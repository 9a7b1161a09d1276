"""A number of a run has one name: in its small curve, in the table of points, in the choices of a series and on a chart."""

from contextlib import closing

from playwright.sync_api import expect

from api.dashboard.series_names import SERIES_NAMES
from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient
from tests.ui.stepping import stepping
from tests.ui.test_metrics import add_metrics

LABELS = "async () => (await import('/ui/static/curves.js')).LABELS"


def test_a_number_has_the_same_name_wherever_it_is_told(browse, axe, ui_service) -> None:
    page, url = browse(ui_service.cats), ui_service.url
    names = {series.value: name for series, name in SERIES_NAMES.items()}
    with stepping(url, ui_service.cats.key) as client, stepping(url, ui_service.dogs.key) as other:
        client.step()
        other.step()
        # A metric of one's own keeps its name as it was given.
        add_metrics(url, ui_service.cats.key, client.run, {1: {"grad_norm": 1.0, "sampling kl": 2.0}})
        page.goto(f"/ui/runs/{client.run}")
        columns = page.locator("#points thead th").all_inner_texts()
        assert columns == ["Step", *names.values(), "Loss function", "Ended"]
        small = page.locator("#metrics .small-name").all_text_contents()
        options = page.locator("#series option").all_text_contents()
        assert small == options == [*list(names.values())[1:], "grad_norm", "sampling kl"]
        assert page.evaluate(LABELS) == names
        for name in list(names.values())[1:]:
            expect(page.get_by_role("img", name=f"Curve of {name};")).to_have_count(1)
        axe(page)
        with closing(RawClient(url, ui_service.cats.key)) as raw:
            second = raw.model(BASE_NAME)
        page.goto(f"/ui/runs/compare?run={client.run}&run={second}")
        options = page.locator("#series option").all_text_contents()
        assert options == [*names.values(), "grad_norm", "sampling kl"]
        beside = browse(ui_service.dogs)
        beside.goto(f"/ui/runs/{other.run}")
        assert beside.locator("#series option").all_text_contents() == list(names.values())[1:]
