"""The queue in a browser: what waits and why, live, with nothing of other tenants but sums."""

import re
import time
from typing import Any
from urllib.parse import quote

import httpx
from playwright.sync_api import Page, expect

from api.dashboard.rendering import count, duration, short_id
from contracts.plurals import noun
from tests.ui.browser import SECONDS
from tests.ui.conftest import UiService, UiTenant
from tests.ui.still_queue import BASE
from tests.ui.stored import write_rows


def test_a_tenants_waiting_samples_are_told_with_their_reason_until_they_end(
    browse, axe, ui_service, speakers, cat
) -> None:
    dog = speakers[1]
    cat.gate("pause", mode="keep", reason="upkeep at noon", ttl_seconds=3600, timeout_seconds=0)
    dog.gate("pause", mode="keep", timeout_seconds=0)
    mine, theirs = [cat.send(tokens=5) for _ in range(2)], dog.send(tokens=5)
    page = browse(ui_service.cats)
    page.goto("/ui/queue")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    assert rows.evaluate_all("all => all.map((one) => one.dataset.request)") == mine
    expect(rows.first).to_contain_text("gate paused")
    expect(rows.first).to_contain_text("upkeep at noon")
    expect(rows.first).to_contain_text(re.compile(r"ends in \d+\W(min|h)"))
    expect(rows.first).to_contain_text(f"sampling from model {short_id(cat.run)} is paused")
    expect(rows.first.locator("td.long a")).to_have_attribute("href", f"/ui/adapters/{quote(cat.run)}")
    axe(page)
    assert theirs not in page.content()
    assert dog.run not in page.content()
    rows.first.locator("td.long a").click()
    expect(page.locator(".gate-panel")).to_have_attribute("data-state", "paused")
    page.go_back()
    cat.gate("resume")
    expect(page.get_by_text("Nothing waits")).to_be_visible()
    other = browse(ui_service.dogs)
    other.goto("/ui/queue")
    expect(other.locator("tbody tr")).to_have_count(1)
    assert all(one not in other.content() for one in mine)
    dog.gate("resume")


def test_the_queue_is_a_list_without_scripts(browse, ui_service, cat) -> None:
    cat.gate("pause", timeout_seconds=0)
    sample = cat.send(tokens=2)
    page = browse(ui_service.cats, role="viewer", java_script_enabled=False)
    page.goto("/ui/queue")
    expect(page.locator(f"tr[data-request='{sample}']")).to_contain_text("gate paused")


def told_by_the_api(service: UiService, tenant: UiTenant) -> dict[str, dict[str, Any]]:
    """Return what the API tells to be before each of the tenant's operations in the queue that stands still."""
    address = f"{service.url}/api/weft/v1/operations"
    answer = httpx.get(address, headers={"X-API-Key": tenant.key}, timeout=40).raise_for_status()
    operations = [one for one in answer.json()["operations"] if one["base_model"] == BASE]
    return {one["request_id"]: one["wait"]["ahead"] for one in operations}


def cells(ahead: dict[str, Any] | None) -> list[str]:
    """Return the texts of an operation's last three cells."""
    if ahead is None:
        return ["–", "–", "–"]
    others = f"others about {count(ahead['other_operations'])} ({count(ahead['other_tokens'])} tokens)"
    passes, tokens, eta = ahead["bound_passes"], ahead["bound_tokens"], ahead["eta_seconds"]
    bound = "–"
    if passes is not None:
        bound = f"{count(passes)} {noun(passes, 'pass', 'passes')}"
    elif tokens is not None:
        bound = f"{count(tokens)} {noun(tokens, 'token')}"
    return [f"{count(ahead['own_operations'])} of yours{others}", bound, "–" if eta is None else duration(eta)]


def check_before(page: Page, told: dict[str, dict[str, Any]]) -> None:
    """Assert that the page comes to tell the same, of the same operations in the same order."""
    shown = page.locator("tbody tr").evaluate_all("all => all.map((one) => one.dataset.request)")
    assert [one for one in shown if one in told] == list(told)
    for request, ahead in told.items():
        for place, text in enumerate(cells(ahead)):
            expect(page.locator(f"tr[data-request='{request}'] td").nth(3 + place)).to_have_text(text)


def test_what_is_before_an_operation_and_its_bound_are_the_apis_and_go_on(browse, axe, ui_service, still) -> None:
    page, beside = browse(ui_service.cats), browse(ui_service.dogs)
    for one in (page, beside):
        one.goto("/ui/queue")
    told, theirs = (told_by_the_api(ui_service, one) for one in (ui_service.cats, ui_service.dogs))
    first, last = told[still.passes["cats"][0]], told[still.samples["cats"][-1]]
    assert (first["own_operations"], first["other_operations"], first["eta_seconds"]) == (0, 8, None)
    assert first["bound_passes"] >= 1
    assert (last["own_operations"], last["bound_passes"]) == (2, None)
    assert last["bound_tokens"] > 0
    check_before(page, told)
    check_before(beside, theirs)
    axe(page)
    assert not any(one in page.content() for one in theirs)
    write_rows(ui_service.data, still.end_passes)
    for ended in still.passes["dogs"][:2]:
        expect(beside.locator(f"tr[data-request='{ended}']")).to_have_count(0)
    deadline = time.monotonic() + SECONDS
    # Sums of others may be a second old.
    while (later := told_by_the_api(ui_service, ui_service.cats))[still.passes["cats"][0]]["other_operations"] != 4:
        assert time.monotonic() < deadline, later
    assert later[still.passes["cats"][0]]["eta_seconds"] > 0
    check_before(page, later)
    check_before(beside, told_by_the_api(ui_service, ui_service.dogs))
