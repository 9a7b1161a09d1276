"""Checkpoints in a browser: found, kept for a while, shared, downloaded, and deleted by name or by ticks."""

from collections.abc import Iterator
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient


@pytest.fixture
def saved(ui_service) -> Iterator[tuple[RawClient, str]]:
    """A run with the checkpoints ``one``, ``two`` and ``three``."""
    client = RawClient(ui_service.url, ui_service.cats.key)
    run = client.model(BASE_NAME)
    for number, name in enumerate(("one", "two", "three"), 1):
        client.result(client.post("/save_weights", model_id=run, seq_id=number, path=name))
    yield client, run
    client.close()


def names(client: RawClient, run: str) -> set[str]:
    found = client.http.get(f"/training_runs/{run}/checkpoints").raise_for_status().json()["checkpoints"]
    return {one["checkpoint_id"].partition("/")[2] for one in found}


def at(page: Page, run: str, name: str) -> Page:
    page.goto(f"/ui/checkpoints/{quote(run)}/weights/{name}")
    return page


def last_act(client: RawClient) -> tuple[str, str, str]:
    entry = client.http.get(f"{client.base_url}/api/weft/v1/audit?limit=1").raise_for_status().json()["entries"][0]
    return entry["action"], entry["door"], entry["resource_id"]


def test_a_checkpoint_is_deleted_only_when_its_name_is_typed(browse, axe, watched, ui_service, saved) -> None:
    client, run = saved
    page = at(browse(ui_service.cats), run, "one")
    watched[0].expected.append("400")
    axe(page)
    page.get_by_label("Type one to delete it").fill("two")
    page.get_by_role("button", name="Delete for ever").click()
    expect(page.get_by_text("nothing was deleted")).to_be_visible()
    assert names(client, run) == {"one", "two", "three"}
    at(page, run, "one").get_by_label("Type one to delete it").fill("one")
    page.get_by_role("button", name="Delete for ever").click()
    expect(page.get_by_role("heading", name="Checkpoints")).to_be_visible()
    assert names(client, run) == {"two", "three"}
    assert last_act(client) == ("checkpoint_delete", "ui", f"tinker://{run}/weights/one")


def test_ticked_checkpoints_are_deleted_together_once_they_are_counted(
    browse, axe, ui_service, speakers, saved
) -> None:
    client, run = saved
    page = browse(ui_service.cats, java_script_enabled=False)
    page.goto(f"/ui/checkpoints?run={quote(run)}")
    expect(page.locator("tbody tr")).to_have_count(3)
    for name in ("one", "three"):
        page.get_by_label(f"Tick weights/{name} of {run}").check()
    page.get_by_role("button", name="Delete ticked").click()
    page.get_by_label("Type 2 to delete them").fill("2")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("heading", name="Checkpoints")).to_be_visible()
    assert names(client, run) == {"two"}
    assert len(names(speakers[1].client, speakers[1].run)) == 1


def test_a_link_to_the_files_needs_no_key(browse, ui_service, saved) -> None:
    client, run = saved
    page = at(browse(ui_service.cats), run, "two")
    page.get_by_role("button", name="Make a download link").click()
    link = page.locator("#download-link").get_attribute("href") or ""
    archive = httpx.get(link, timeout=40)
    assert (archive.status_code, b"adapter_model.safetensors" in archive.content) == (200, True)
    assert last_act(client)[:2] == ("checkpoint_read", "ui")


def test_it_is_shared_and_kept_for_a_while_by_forms(browse, axe, ui_service, saved) -> None:
    _, run = saved
    page = at(browse(ui_service.cats), run, "two")
    page.get_by_role("button", name="Publish to all tenants").click()
    expect(page.get_by_text("published", exact=True)).to_be_visible()
    page.get_by_role("button", name="Unpublish").click()
    expect(page.get_by_text("Only your tenant may use it.")).to_be_visible()
    page.get_by_label("Hours from now").fill("5")
    page.get_by_role("button", name="Set").click()
    expect(page.locator("dl.facts")).to_contain_text("in 4")
    page.goto("/ui/checkpoints")
    page.get_by_label("Show").select_option("expiring")
    page.get_by_label("Run").fill(run)
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    axe(page)


def test_a_stranger_and_a_viewer_change_nothing(browse, watched, ui_service, saved) -> None:
    client, run = saved
    address = f"/ui/checkpoints/{quote(run)}/weights/two"
    viewer = at(browse(ui_service.cats, role="viewer"), run, "two")
    expect(viewer.locator("main button:not(.copy)")).to_have_count(0)
    stranger = browse(ui_service.dogs)
    for page, status in ((viewer, 403), (stranger, 404)):
        for one in watched:
            one.expected.append(str(status))
        statuses = page.evaluate(
            """async ([address, path]) => Promise.all(["delete", "publish", "ttl", "download"].map(async (act) => {
                const body = new URLSearchParams({ name: "two", hours: "1" });
                return (await fetch(`${address}/${act}`, { method: "POST", body })).status;
            }))""",
            [address, ""],
        )
        assert statuses == [status] * 4
    assert stranger.request.get(address).status == 404
    assert "two" in names(client, run)
