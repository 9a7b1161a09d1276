"""Adapters and their gates in a browser: paused, resumed and reloaded by button while the SDK samples."""

from urllib.parse import quote

from playwright.sync_api import Page, expect

from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient
from tests.e2e.speaker import MEOW, WOOF
from tests.ui.sdk_calls import begin_sdk_samples, finish_sdk_samples, sdk_samples

LONG, VERY_LONG = 900, 1900
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
    mine = cat.stream(tokens=VERY_LONG).until_tokens(3)
    page.get_by_label("What happens to samples in flight").select_option("wait")
    page.get_by_role("button", name="Pause sampling").click()
    expect(panel(page)).to_have_attribute("data-state", "pausing")
    expect(page.get_by_role("region", name="Samples in flight by replica")).to_contain_text("meow · step 2")
    assert speakers[1].stream(tokens=20).finish()
    # The page follows the drain without being opened again.
    expect(panel(page)).to_have_attribute("data-state", "paused")
    assert len(mine.finish()["sequences"][0]["tokens"]) == VERY_LONG


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
    expect(panel(page)).to_contain_text("drawn from woof · step 4")
    expect(page.locator("tr", has_text="woof")).to_contain_text("followed")
    expect(page.get_by_role("button", name="Load woof into live samplers")).to_have_count(0)
    sample = cat.stream(tokens=3)
    sample.finish()
    (used,) = cat.report(sample)["versions"]
    assert used["path"] == cat.paths[WOOF]
    assert speakers[1].gate() == before


def test_a_loaded_version_is_followed_with_no_live_sampler_of_an_sdk_until_a_newer_one_is_saved(
    browse, ui_service, speakers
) -> None:
    client = speakers[0].client
    run = client.model(BASE_NAME)
    first, second = (save(client, run, seq_id, name) for seq_id, name in ((1, "first"), (2, "second")))
    neighbour = speakers[1].gate("reload", path=speakers[1].paths["moo "])["version"]
    page = at_gate(browse(ui_service.cats), run)
    expect(panel(page)).to_contain_text("drawn from second")
    assert drawn_by_name(client, run) == second
    page.get_by_role("button", name="Load first into live samplers").click()
    expect(panel(page)).to_contain_text("drawn from first")
    assert [drawn_by_name(client, run) for _ in range(2)] == [first, first]
    page.goto(f"/ui/runs/{quote(run)}")
    expect(page.locator("main")).to_contain_text("Live samplers were pointed at first")
    third = save(client, run, 3, "third")
    assert drawn_by_name(client, run) == third
    expect(panel(at_gate(page, run))).to_contain_text("drawn from third")
    assert drawn_by_name(speakers[1].client, speakers[1].run) == speakers[1].paths["moo "]
    assert speakers[1].gate("reload", path=speakers[1].paths["moo "])["version"] == neighbour


def save(client: RawClient, run: str, seq_id: int, name: str) -> str:
    """Save a version for samplers, and return its path."""
    saved = client.post("/save_weights_for_sampler", model_id=run, seq_id=seq_id, path=name)
    path: str = client.result(saved)["path"]
    return path


def drawn_by_name(client: RawClient, run: str) -> str:
    """Return the path of the version that an OpenAI client's sample of the run is drawn from."""
    asked = {"model": run, "prompt": [1, 2], "max_tokens": 2}
    made = client.http.post(f"{client.base_url}/v1/completions", json=asked).raise_for_status().json()
    report = client.http.get(f"/samples/{made['id'].removeprefix('cmpl-')}").raise_for_status().json()
    (version,) = report["versions"]
    path: str = version["path"]
    return path


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
    expect(page.locator("main button:not(.copy)")).to_have_count(0)
    axe(page)
