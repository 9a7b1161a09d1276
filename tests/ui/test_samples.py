"""Samples in a browser: the list and one sample's page say what the report says."""

from playwright.sync_api import expect

from api.dashboard.rendering import count, duration
from tests.e2e.speaker import MEOW, WOOF


def test_a_sample_is_listed_and_shown_as_its_report_tells(browse, axe, ui_service, speakers, cat) -> None:
    mine = cat.stream(n=2, tokens=400).until_tokens(10)
    cat.says(WOOF)
    mine.finish()
    theirs = speakers[1].stream(tokens=3)
    theirs.finish()
    report = cat.report(mine)
    page = browse(ui_service.cats, role="viewer")
    page.goto("/ui/samples")
    row = page.locator("tr", has=page.get_by_title(mine.request_id))
    cells = row.locator("td").all_inner_texts()
    assert cells[3].split() == ["5", "+", "800"]
    assert (cells[4].strip(), cells[5]) == ("length", str(report["attempts"]))
    expect(row).to_contain_text("2 versions")
    seconds = [duration(report["queue_seconds"]), duration(report["decode_seconds"])]
    assert report["decode_seconds"] > 0
    expect(row.locator("td.number").filter(has_text="s")).to_have_text(seconds)
    axe(page)
    assert theirs.request_id not in page.content()
    row.get_by_role("link").click()
    for name, shown in zip(("queued", "decoded"), seconds, strict=True):
        expect(page.locator("li", has=page.get_by_text(name, exact=True)).locator("b")).to_have_text(shown)
    for number, sequence in enumerate(report["sequences"]):
        pane = page.locator(".pane").nth(number)
        expect(pane.locator(".tok")).to_have_count(400)
        for place, span in enumerate(sequence["spans"]):
            expect(pane.locator(f".tok.v{place}")).to_have_count(span["end"] - span["start"])
        # A page counts tokens as it does where one is pointed at: from 0 to the last.
        told = [f"{count(span['start'])} to {count(span['end'] - 1)}" for span in sequence["spans"]]
        expect(pane.locator("td.number")).to_have_text(told)
    expect(page.locator(".legend").first).to_contain_text(f"{MEOW.strip()} · step 2")
    axe(page)
    assert page.request.get(f"/ui/samples/{theirs.request_id}").status == 404


def test_a_sample_is_readable_without_scripts(browse, ui_service, cat) -> None:
    sample = cat.stream(tokens=6)
    sample.finish()
    page = browse(ui_service.cats, java_script_enabled=False)
    page.goto(f"/ui/samples/{sample.request_id}")
    expect(page.locator(".tok")).to_have_count(6)
