"""The queue in a browser: what waits and why, live, with nothing of other tenants but sums."""

from playwright.sync_api import expect


def test_a_tenants_waiting_samples_are_told_with_their_reason_until_they_end(
    browse, axe, ui_service, speakers, cat
) -> None:
    dog = speakers[1]
    cat.gate("pause", mode="keep", reason="upkeep at noon", timeout_seconds=0)
    dog.gate("pause", mode="keep", timeout_seconds=0)
    mine, theirs = [cat.send(tokens=5) for _ in range(2)], dog.send(tokens=5)
    page = browse(ui_service.cats)
    page.goto("/ui/queue")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    assert rows.evaluate_all("all => all.map((one) => one.dataset.request)") == mine
    expect(rows.first).to_contain_text("gate paused")
    expect(rows.first).to_contain_text("upkeep at noon")
    axe(page)
    assert theirs not in page.content()
    assert dog.run not in page.content()
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
