"""Webhooks in a browser: made with a secret that is shown once, tested with a receiver, switched off and deleted."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from playwright.sync_api import expect


@dataclass
class Receiver:
    """A server on loopback that takes every event."""

    url: str
    got: list[dict[str, object]] = field(default_factory=list)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver("")

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taker)
    made.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_test_event_reaches_the_receiver_and_the_page_tells_so(browse, axe, ui_service, receiver) -> None:
    page, other = browse(ui_service.cats), browse(ui_service.dogs)
    page.goto("/ui/webhooks")
    page.get_by_label("Name", exact=True).fill("bell")
    page.get_by_label("Address", exact=True).fill(receiver.url)
    page.get_by_label("Note", exact=True).fill("<img src=x onerror=alert(1)>")
    page.get_by_role("button", name="Make the webhook").click()
    secret = page.locator("#secret").inner_text()
    assert secret.startswith("whsec_")
    expect(page.get_by_text("<img src=x onerror=alert(1)>").first).to_be_visible()
    axe(page)
    page.get_by_role("button", name="Send a test event").click()
    assert secret not in page.content()
    row = page.locator('tr[data-event="webhook.test"]')
    expect(row).to_contain_text("taken")
    (event,) = receiver.got
    assert event["type"] == "weft.webhook.test"
    axe(page)
    other.goto("/ui/webhooks")
    expect(other.get_by_role("heading", name="Make the first webhook")).to_be_visible()
    assert other.request.get("/ui/webhooks/bell").status == 404
    page.get_by_role("button", name="Disable").click()
    expect(page.get_by_role("button", name="Enable")).to_be_visible()
    page.get_by_text("Delete this webhook…").click()
    page.get_by_role("button", name="Delete for ever").click()
    expect(page.get_by_role("heading", name="Make the first webhook")).to_be_visible()


def test_webhooks_are_forms_and_tables_without_scripts(browse, ui_service) -> None:
    page = browse(ui_service.dogs, java_script_enabled=False, viewport={"width": 390, "height": 800})
    page.goto("/ui/webhooks")
    page.get_by_label("Name", exact=True).fill("gong")
    page.get_by_label("Address", exact=True).fill("https://gong.example/")
    page.get_by_role("checkbox", name="budget.alert").check()
    page.get_by_role("button", name="Make the webhook").click()
    expect(page.locator("#secret")).to_be_visible()
    expect(page.locator("dl.facts")).to_contain_text("budget.alert")
    page.get_by_role("button", name="Send a test event").click()
    expect(page.locator('tr[data-event="webhook.test"]')).to_be_visible()
