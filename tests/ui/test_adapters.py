"""Adapters and their gates in a browser: paused, resumed and reloaded by button while the SDK samples."""

from urllib.parse import quote

from playwright.sync_api import Page, expect

from tests.e2e.speaker import MEOW, WOOF
from tests.ui.sdk_calls import begin_sdk_samples, finish_sdk_samples, sdk_samples

LONG = 900
"""Tokens of a sample that a pause finds in flight."""


def panel(page: Page):
    return page.locator(".gate-panel")


def at_gate(page: Page, run: str) -> Page:
    page.goto(f"/ui/adapters/{quote(run)}")
    return page


def test_a_pause_by_button_holds_the_sdks_samples_and_no_others(browse, axe, ui_service, speakers, cat) -> None:
    expected = sdk_samples(ui_service.url, ui_service.cats.key, cat.paths[MEOW], tokens=LONG)
    page = at_gate(browse(ui_service.cats), cat.run)
    sampling = begin_sdk_samples(ui_service.url, ui_service.cats.key, cat.paths[MEOW], tokens=LONG)
    cat.until_in_flight(1)
    beside = speakers[1].stream(tokens=300).until_tokens(3)
    page.get_by_label("Reason").fill("swapping <b>weights</b>")
    page.get_by_role("button", name="Pause sampling").click()
    expect(panel(page)).to_have_attribute("data-state", "paused")
    expect(panel(page)).to_have_attribute("data-in-flight", "0")
    expect(panel(page)).to_contain_text("swapping <b>weights</b>")
    axe(page)
    beside.finish()
    assert speakers[1].report(beside)["attempts"] == 1
    assert sampling.poll() is None
    page.get_by_role("button", name="Resume").click()
    expect(panel(page)).to_have_attribute("data-state", "open")
    assert finish_sdk_samples(sampling) == expected


def test_a_pause_that_waits_is_pausing_until_the_last_sample_has_ended(browse, ui_service, speakers, cat) -> None:
    page = at_gate(browse(ui_service.cats), cat.run)
    mine = cat.stream(tokens=LONG).until_tokens(3)
    page.get_by_label("What happens to samples in flight").select_option("wait")
    page.get_by_role("button", name="Pause sampling").click()
    expect(panel(page)).to_have_attribute("data-state", "pausing")
    expect(page.get_by_role("region", name="Samples in flight by replica")).to_contain_text("meow · step 2")
    assert speakers[1].stream(tokens=20).finish()
    # The page follows the drain without being opened again.
    expect(panel(page)).to_have_attribute("data-state", "paused")
    assert len(mine.finish()["sequences"][0]["tokens"]) == LONG


def test_a_form_that_has_shown_another_generation_is_refused(browse, watched, ui_service, cat) -> None:
    page = at_gate(browse(ui_service.cats, java_script_enabled=False), cat.run)
    watched[0].expected.append("400")
    cat.gate("pause", reason="another", timeout_seconds=0)
    page.get_by_role("button", name="Pause sampling").click()
    expect(page.get_by_role("alert")).to_contain_text("another controller has changed it since")
    assert cat.gate()["reason"] == "another"
    page.get_by_role("button", name="Resume").click()
    expect(panel(page)).to_have_attribute("data-state", "open")
    assert cat.gate()["state"] == "open"


def test_a_version_is_loaded_by_button(browse, ui_service, speakers, cat) -> None:
    before = speakers[1].gate()
    page = at_gate(browse(ui_service.cats, java_script_enabled=False), cat.run)
    page.get_by_role("button", name="Load woof into live samplers").click()
    expect(page.get_by_role("heading", name="Gate")).to_be_visible()
    sample = cat.stream(tokens=3)
    sample.finish()
    (used,) = cat.report(sample)["versions"]
    assert used["path"] == cat.paths[WOOF]
    assert speakers[1].gate() == before


def test_the_list_follows_a_pause_and_has_no_strangers_adapter(browse, axe, ui_service, speakers, cat) -> None:
    page = browse(ui_service.cats)
    page.goto("/ui/adapters")
    row = page.locator("tr", has_text=cat.run)
    expect(row).to_contain_text("open")
    cat.gate("pause", reason="watched", timeout_seconds=0)
    expect(row).to_contain_text("watched")
    axe(page)
    assert speakers[1].run not in page.content()
    assert page.request.get(f"/ui/adapters/{quote(speakers[1].run)}").status == 404


def test_a_viewer_sees_the_gate_and_no_button(browse, axe, ui_service, cat) -> None:
    page = at_gate(browse(ui_service.cats, role="viewer"), cat.run)
    expect(panel(page)).to_have_attribute("data-state", "open")
    expect(page.locator("main button")).to_have_count(0)
    axe(page)
