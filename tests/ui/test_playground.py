"""The playground in a browser: streams coloured by version, equal to the report and to the SDK's sample, stopped and paused."""

import json
from urllib.parse import quote

from playwright.sync_api import Locator, Page, Route, expect

from api.dashboard.rendering import short_id
from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient
from tests.e2e.speaker import MEOW, WOOF
from tests.ui.sdk_calls import sdk_samples

BROKEN_OFF = 9
"""Times that a stream is asked for: more than the page asks for one that never begins."""
LONG = 900
"""Tokens of a sample that is swapped, paused or stopped long before its end."""


def fill(page: Page, model: str, beside: str = "", *, tokens: int = 40, prompt: str = "Say: ") -> Page:
    """Open the playground and fill its form for a greedy sample."""
    page.goto(f"/ui/playground?model={quote(model)}&beside={quote(beside)}")
    expect(page.locator("body[data-playground=ready]")).to_have_count(1)
    page.get_by_label("Text", exact=True).fill(prompt)
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Temperature").fill("0")
    return page


def press(page: Page) -> None:
    page.get_by_role("button", name="Sample", exact=True).click()


def pane(page: Page, number: int = 0):
    return page.locator(f"#pane{number}")


def ended(page: Page, state: str = "done", number: int = 0) -> None:
    expect(pane(page, number)).to_have_attribute("data-state", state, timeout=60_000)


def drawn(page: Page, count: int) -> None:
    """Wait until the first pane shows so many tokens."""
    page.locator(f"#pane0-t{count}").wait_for(state="attached")


def tokens_of(page: Page, number: int = 0) -> list[int]:
    found: list[int] = page.locator(f"#pane{number} .tok").evaluate_all("all => all.map((one) => +one.dataset.token)")
    return found


def colours(shown: Locator) -> list[str]:
    """Return the class of each element that gives it the colour and the underline of a version."""
    found: list[str] = shown.evaluate_all("all => all.map((one) => one.classList[1])")
    return found


def test_a_swap_in_mid_stream_shows_two_colours_as_the_report_tells(browse, axe, ui_service, speakers, cat) -> None:
    beside = speakers[1].stream(tokens=300).until_tokens(3)
    page = fill(browse(ui_service.cats), cat.run, tokens=LONG)
    press(page)
    drawn(page, 20)
    new = cat.says(WOOF)
    expect(pane(page).locator(".tok.v1").first).to_be_attached()
    ended(page)
    report = cat.client.http.get(f"/samples/{pane(page).get_attribute('data-request')}").json()
    spans = report["sequences"][0]["spans"]
    assert json.loads(pane(page).get_attribute("data-spans") or "") == spans
    assert (len(spans), spans[1]["version"]) == (2, new)
    expect(pane(page).locator(".legend li")).to_have_count(2)
    expect(pane(page).locator(".legend")).to_contain_text("woof · step 4")
    assert pane(page).locator(".tok.first").evaluate_all("all => all.map((one) => one.dataset.letter)") == ["A", "B"]
    by_span = [f"v{place}" for place, span in enumerate(spans) for _ in range(span["start"], span["end"])]
    assert colours(pane(page).locator(".tok")) == by_span
    assert colours(pane(page).locator(".legend .chip")) == ["v0", "v1"]
    axe(page)
    page.goto(f"/ui/samples/{report['request_id']}")
    assert colours(page.locator(".tok")) == by_span
    assert colours(page.locator(".legend .chip")) == ["v0", "v1"]
    axe(page)
    beside.finish()
    assert speakers[1].report(beside)["attempts"] == 1


def test_the_text_is_that_of_the_sdks_greedy_sample_bit_for_bit(browse, ui_service, speakers, cat) -> None:
    page = fill(browse(ui_service.cats), cat.paths[MEOW], cat.paths[WOOF])
    press(page)
    for number, word in enumerate((MEOW, WOOF)):
        ended(page, number=number)
        (expected,) = sdk_samples(ui_service.url, ui_service.cats.key, cat.paths[word], tokens=40)
        assert tokens_of(page, number) == expected
        assert pane(page, number).get_attribute("data-text") == bytes(expected).decode(errors="replace")


def test_a_models_label_begins_with_what_tells_it_apart(browse, axe, ui_service, speakers, cat) -> None:
    client = RawClient(ui_service.url, ui_service.cats.key)
    asked = {"model_seq_id": 0, "base_model": BASE_NAME, "lora_config": {"rank": 4, "seed": 1}}
    purpose = {"user_metadata": {"purpose": "<b>purr</b>\u202e"}}
    run = client.result(client.post("/create_model", session_id=client.session(), **asked, **purpose))["model_id"]
    for seq_id, name in enumerate(("first", "second"), start=1):
        client.result(client.post("/save_weights_for_sampler", model_id=run, path=name, seq_id=seq_id))
    client.close()
    path, told = f"tinker://{run}/sampler_weights/first", f"{short_id(run)} · purpose=<b>purr</b>⟨U+202E⟩"
    page = fill(browse(ui_service.cats), path, BASE_NAME, tokens=4)
    choice = page.get_by_label("Sample from")
    shown = {
        option["value"]: (option["text"], option["title"])
        for option in choice.locator("option").evaluate_all(
            "all => all.map((one) => ({ value: one.value, text: one.textContent, title: one.title }))"
        )
    }
    assert {title for _, title in shown.values()} == set(shown)
    assert shown[path][0] == f"first · step 0 · {told}"
    assert shown[path.replace("first", "second")][0] == f"second · step 0 · {told}"
    assert shown[run][0] == told
    assert shown[cat.paths[WOOF]][0] == f"woof · step 4 · {short_id(cat.run)}"
    assert len({text for text, _ in shown.values()}) == len(shown)
    assert not any(speakers[1].run in one for one in shown)
    assert choice.evaluate("one => one.selectedOptions[0].value") == path
    press(page)
    ended(page)
    for number, name in enumerate((path, BASE_NAME)):
        heading = pane(page, number).get_by_role("heading")
        expect(heading).to_have_text(shown[name][0])
        expect(heading).to_have_attribute("title", name)
    axe(page)
    # One that is not offered is told as its name alone tells.
    page.goto(f"/ui/playground?model={quote(speakers[1].paths['moo '])}")
    expect(choice.locator("option[selected]")).to_have_text(f"moo · {short_id(speakers[1].run)}")


def test_a_token_tells_its_logprob_and_what_else_was_likely(browse, ui_service, cat) -> None:
    page = fill(browse(ui_service.cats), cat.paths[MEOW], tokens=8)
    press(page)
    ended(page)
    box = pane(page).locator(".inspector")
    pane(page).locator(".tok").nth(3).hover()
    expect(box).to_have_attribute("data-token", "3")
    expect(box).to_contain_text("Logprob")
    expect(box.locator("tr")).to_have_count(5)
    pane(page).locator(".tokens").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(box).to_have_attribute("data-token", "6")


def test_the_stop_button_cancels_the_sample(browse, ui_service, speakers, cat) -> None:
    beside = speakers[1].stream(tokens=300).until_tokens(3)
    page = fill(browse(ui_service.cats), cat.run, tokens=LONG)
    press(page)
    drawn(page, 10)
    page.get_by_role("button", name="Stop").click()
    ended(page, "stopped")
    answer = cat.client.wait(pane(page).get_attribute("data-request") or "").json()
    assert "cancelled" in answer["error"]
    beside.finish()
    assert speakers[1].report(beside)["attempts"] == 1


def test_a_stop_before_the_sample_is_accepted_stops_it_once_it_is(browse, ui_service, speakers, cat) -> None:
    """The request is held on its way, as by a slow network, until the button has been pressed."""
    beside = speakers[1].stream(tokens=300).until_tokens(3)
    page = fill(browse(ui_service.cats), cat.run, tokens=LONG)
    held: list[Route] = []
    page.route("**/ui/playground/stream", lambda route: held.append(route))
    with page.expect_request("**/ui/playground/stream"):
        press(page)
    page.get_by_role("button", name="Stop").click()
    expect(pane(page).locator(".pane-state")).to_have_text("Stopping …")
    held[0].continue_()
    ended(page, "stopped")
    assert "cancelled" in cat.client.wait(pane(page).get_attribute("data-request") or "").json()["error"]
    beside.finish()
    assert speakers[1].report(beside)["attempts"] == 1


def test_a_stream_goes_on_after_a_refusal_or_an_outage_of_a_moment_and_however_often_it_breaks_off(
    browse, watched, ui_service, speakers, cat
) -> None:
    beside = speakers[1].stream(tokens=300).until_tokens(3)
    page = fill(browse(ui_service.cats), cat.run, tokens=12)
    watched[0].expected += ["Failed to load resource"]
    told = {"request_id": "r", "model": "m", "run": None, "prompt_tokens": 1}
    accepted = f"event: accepted\ndata: {json.dumps(told)}\n\n"
    ending = f"event: error\ndata: {json.dumps({'error': 'the service ends', 'code': 'unavailable'})}\n\n"
    asked: list[str] = []

    def answer(route: Route) -> None:
        asked.append(route.request.headers["idempotency-key"])
        if len(asked) == 1:
            route.fulfill(status=503, json={"detail": "the service stops", "code": "unavailable"})
        elif len(asked) < BROKEN_OFF:
            body = accepted + ending if len(asked) == 2 else accepted
            route.fulfill(status=200, content_type="text/event-stream", body=body)
        else:
            route.continue_()

    page.route("**/ui/playground/stream", answer)
    press(page)
    ended(page)
    assert len(tokens_of(page)) == 12
    assert (len(asked), len(set(asked))) == (BROKEN_OFF, 1)
    beside.finish()
    assert speakers[1].report(beside)["attempts"] == 1


def test_a_service_that_refuses_for_long_is_told_in_its_own_words(browse, watched, ui_service) -> None:
    page = fill(browse(ui_service.cats), BASE_NAME, tokens=4)
    watched[0].expected += ["Failed to load resource"]
    asked: list[int] = []

    def answer(route: Route) -> None:
        asked.append(1)
        route.fulfill(status=503, json={"detail": "the service stops", "code": "unavailable"})

    page.route("**/ui/playground/stream", answer)
    press(page)
    expect(pane(page).locator(".pane-state")).to_have_text("the service stops; trying again …")
    ended(page, "refused")
    expect(pane(page).locator(".pane-state")).to_have_text("the service stops")
    assert len(asked) == 6


def test_a_pause_in_the_middle_holds_the_stream_until_it_goes_on(browse, ui_service, speakers, cat) -> None:
    page = fill(browse(ui_service.cats), cat.run, tokens=LONG)
    press(page)
    drawn(page, 10)
    pane(page).get_by_role("button", name="Pause").click()
    expect(pane(page).locator(".gate-state.badge-warn")).to_have_text("paused")
    expect(pane(page)).to_have_attribute("data-state", "paused")
    assert cat.gate()["in_flight"] == 0
    shown = len(tokens_of(page))
    assert speakers[1].stream(tokens=20).finish()
    assert len(tokens_of(page)) == shown < LONG
    expect(pane(page).locator(".pane-state")).to_have_text(f"Paused after {shown} tokens: goes on when the gate opens")
    pane(page).get_by_role("button", name="Resume").click()
    ended(page)
    sample = pane(page).get_attribute("data-request")
    assert cat.client.http.get(f"/samples/{sample}").json()["attempts"] == 2


def test_without_scripts_the_form_gives_the_whole_answers(browse, ui_service, cat) -> None:
    page = browse(ui_service.cats, java_script_enabled=False)
    page.goto(f"/ui/playground?model={quote(cat.paths[MEOW])}&beside={BASE_NAME}")
    page.get_by_label("Text", exact=True).fill("Say: ")
    page.get_by_label("Max tokens").fill("12")
    page.get_by_label("Temperature").fill("0")
    press(page)
    expect(page.locator("#pane0 .tok")).to_have_count(12)
    expect(page.locator("#pane0 h2")).to_have_text(f"meow · step 2 · {short_id(cat.run)}")
    expect(page.locator("#pane1 .tok.v1").first).to_be_visible()
    expect(page.locator("#pane1 .legend")).to_contain_text("bare base model")
    page.goto("/ui/samples")
    expect(page.locator("tbody tr").first).to_contain_text("+ 12")


def test_hostile_output_is_text_with_its_hidden_characters_marked(browse, ui_service) -> None:
    """Draw a token by the function that draws streamed ones."""
    page = browse(ui_service.cats)
    page.goto("/ui/playground")
    shown = page.evaluate(
        """async () => {
            const { tokenElement } = await import("/ui/static/tokens.js");
            const text = "<img src=x onerror=alert(1)>\\u202egnp\\u0007\\u200b";
            const token = { index: 0, id: 7, text, logprob: -1, top: [[text, -1]] };
            const element = tokenElement(token, 0, true, "x");
            document.querySelector(".tokens").append(element);
            return [element.querySelectorAll("img").length, element.textContent];
        }"""
    )
    assert shown == [0, "<img src=x onerror=alert(1)>U+202EgnpU+0007U+200B"]


def test_a_viewer_is_offered_nothing_and_refused_by_hand(browse, watched, ui_service, cat) -> None:
    page = browse(ui_service.cats, role="viewer")
    watched[0].expected.append("403")
    page.goto("/ui/playground")
    expect(page.get_by_role("button", name="Sample", exact=True)).to_have_count(0)
    before = cat.client.http.get(f"{ui_service.url}/api/weft/v1/samples").json()["samples"]
    statuses = page.evaluate(
        """async (paths) => Promise.all(paths.map(async (path) => {
            const body = new URLSearchParams({ model: "weft/tiny", prompt: "x", max_tokens: "1" });
            return (await fetch(path, { method: "POST", body })).status;
        }))""",
        ["/ui/playground", "/ui/playground/stream", f"/ui/adapters/{cat.run}/pause", f"/ui/samples/{cat.run}/stop"],
    )
    assert statuses == [403] * 4
    assert cat.client.http.get(f"{ui_service.url}/api/weft/v1/samples").json()["samples"] == before
