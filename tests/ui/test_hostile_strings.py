"""Hostile texts in every stored field, and every page of a tenant and of the operators that shows them, in a real browser."""

import csv
import io
import re
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote, urljoin, urlsplit

import pytest
from playwright.sync_api import Page

from tests.e2e.conftest import BASE_NAME, make_key, make_tenant
from tests.e2e.raw_client import RawClient, pass_message
from tests.ui.conftest import UiTenant
from tests.ui.hostile_rows import ELEMENT, SUM, columns_without, make_hostile
from tests.ui.stored import write_rows
from tests.ui.test_operators import id_of

MOST_PAGES = 70
_SAME_KIND = re.compile(r"[0-9a-f]{8}[0-9a-f-]*(:train:\d+)?|%[0-9A-F]{2}[^/?&]*|\d+|W+")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Hostile:
    """A tenant whose texts are hostile, its name included, so that it is known by its id."""

    tenant: UiTenant
    id: str


@pytest.fixture(scope="module")
def hostile(ui_service) -> Hostile:
    """A tenant that has one of each thing, all of whose texts are hostile."""
    key = make_tenant(ui_service.data, "hostile")
    tenant = UiTenant("hostile", ui_service.data, key, {"admin": make_key(ui_service.data, "hostile", role="admin")})
    found = Hostile(tenant, id_of(ui_service, tenant))
    client = RawClient(ui_service.url, tenant.keys["admin"])
    own = f"{ui_service.url}/api/weft/v1"
    try:
        run = client.model(BASE_NAME)
        client.result(client.passes(pass_message(run, 1, [1, 2, 3])))
        client.result(client.step(run, 2, learning_rate=1e-3))
        for place, name in (("save_weights", "one"), ("save_weights_for_sampler", "two")):
            client.result(client.post(f"/{place}", model_id=run, path=name, seq_id=3 if name == "one" else 4))
        told = client.post(
            "/create_sampling_session",
            session_id=run.partition(":")[0],
            sampling_session_seq_id=1,
            base_model=BASE_NAME,
        )
        sample = {
            "sampling_session_id": told.json()["sampling_session_id"],
            "seq_id": 1,
            "num_samples": 1,
            "prompt": {"chunks": [{"tokens": list(b"<script>")}]},
            "sampling_params": {"max_tokens": 4},
        }
        client.result(client.post("/asample", **sample))
        event = {
            "event": "UNHANDLED_EXCEPTION",
            "event_id": "1",
            "error_type": "E",
            "error_message": "m",
            "traceback": "t",
        }
        dead = client.session()
        answers = [
            client.post("/telemetry", session_id=dead, events=[event], platform="p", sdk_version="s"),
            client.http.post(f"{own}/runs/{run}/points", json={"points": [{"step": 1, "metrics": {"m": 1.0}}]}),
            client.http.post(f"{own}/projects", json={"name": "p"}),
            client.http.put(f"{own}/webhooks/hook", json={"url": "http://127.0.0.1:9/hook", "events": ["*"]}),
            client.post(f"/adapters/{run}/pause", mode="keep", reason="r"),
        ]
        assert [answer.text for answer in answers if answer.status_code >= 300] == []
        saved = client.post("/save_weights", model_id=run, path=f"<{ELEMENT}>", seq_id=5)
        hook = client.http.put(f"{own}/webhooks/{quote(f'<{ELEMENT}>')}", json={"url": "http://127.0.0.1:9/hook"})
        assert (hook.status_code, "error" in client.result(saved)) == (400, True)
        client.post(f"/sessions/{dead}/finish", reason={"type": "error"}, detail="d")
        write_rows(ui_service.data, partial(make_hostile, tenant=found.id, run=run))
    finally:
        client.close()
    return found


def _check(page: Page, place: str) -> None:
    """Fail if a text became an element, a script, a link or a number, or makes the page wider than its window."""
    found = page.evaluate(
        """(name) => [
          document.querySelectorAll(name + ", [onerror], [onclick], img[src=x]").length,
          document.querySelectorAll('a[href^="javascript:" i], form[action^="javascript:" i]').length,
          document.title,
          document.documentElement.scrollWidth - document.documentElement.clientWidth,
          document.documentElement.textContent.includes("\\u202e"),
        ]""",
        ELEMENT,
    )
    assert found[:2] == [0, 0], place
    assert found[2] != "hit", place
    assert found[3] <= 0, f"{place} is {found[3]} px wider than its window"
    assert not found[4], f"{place} turns a text around"
    assert str(SUM) not in page.content(), place


def _links(page: Page, prefix: str) -> list[str]:
    found = page.evaluate("() => [...document.querySelectorAll('a[href]')].map((one) => one.href)")
    paths = [urlsplit(urljoin(page.url, one)) for one in found]
    return [f"{one.path}?{one.query}" if one.query else one.path for one in paths if one.path.startswith(prefix)]


def _crawl(page: Page, start: str, prefix: str) -> tuple[int, int]:
    """Open a page of each kind that links lead to; return how many were opened, and on how many hostile texts were seen."""
    waiting, kinds, opened, seen = [start], set[str](), 0, 0
    while waiting and opened < MOST_PAGES:
        place = waiting.pop(0)
        kind = _SAME_KIND.sub("*", place)
        if kind in kinds or "logout" in place:
            continue
        kinds.add(kind)
        if ".csv" in place or "/export" in place:
            _check_file(page, place)
            continue
        status = page.goto(place).status
        assert status < 500, place
        opened += 1
        _check(page, place)
        seen += f"<{ELEMENT}>" in page.locator("body").inner_text()
        waiting += _links(page, prefix)
    assert opened < MOST_PAGES, "links lead on and on"
    return opened, seen


def _check_file(page: Page, place: str) -> None:
    """Fail for a cell of a file that a spreadsheet would compute."""
    answer = page.request.get(place)
    assert (answer.status, "text/csv" in answer.headers["content-type"]) == (200, True), place
    cells = [cell for row in csv.reader(io.StringIO(answer.text())) for cell in row]
    assert len(cells) > 2
    assert not [one for one in cells if one.startswith(_FORMULA) and not _is_number(one)], place


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def test_every_field_that_keeps_a_text_is_hostile_here(hostile, ui_service) -> None:
    missing: list[str] = []

    async def read(database) -> None:
        missing.extend(await columns_without(database, hostile.id))

    write_rows(ui_service.data, read)
    assert missing == []


def test_a_tenants_pages_show_hostile_texts_as_texts(browse, hostile, ui_service, watched) -> None:
    page = browse(hostile.tenant, viewport={"width": 390, "height": 800})
    watched[0].expected.append("404")
    opened, seen = _crawl(page, "/ui", "/ui")
    assert opened >= 16
    assert seen >= 8
    other = browse(ui_service.dogs)
    for place in ("/ui", "/ui/runs", "/ui/errors"):
        other.goto(place)
        assert ELEMENT not in other.content()


def test_operators_pages_show_hostile_texts_as_texts(operate, hostile, watched) -> None:
    page = operate(viewport={"width": 390, "height": 800})
    watched[0].expected.append("404")
    opened, seen = _crawl(page, "/ops", "/ops")
    assert opened >= 10
    assert seen >= 4
