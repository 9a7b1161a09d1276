"""A script of the real SDK that dies is seen on the dashboard and by the API, with the same text, by its tenant alone."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
from playwright.sync_api import expect

from tests.e2e.conftest import BASE_NAME
from tests.ui.sdk_dies import HOSTILE

SCRIPT = Path(__file__).with_name("sdk_dies.py")
HOSTILE_FIELDS = ("error_type", "error_message", "traceback")


def test_a_script_that_dies_is_seen_with_its_traceback_by_its_tenant_alone(browse, axe, ui_service) -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), ui_service.url, ui_service.cats.key, BASE_NAME]
    environment = {**os.environ, "TINKER_TELEMETRY": "1"}
    died = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert died.returncode == 1, died.stderr
    assert "KeyError" in died.stderr
    run = died.stdout.split()[0]
    route = ui_service.url + "/api/weft/v1/client-exceptions"
    answers = [
        httpx.get(route, params=query, headers={"X-API-Key": tenant.key}, timeout=40)
        for tenant, query in (
            (ui_service.cats, {"run_id": run}),
            (ui_service.dogs, {"run_id": run}),
            (ui_service.dogs, {}),
        )
    ]
    assert answers[1].status_code == 404
    assert answers[2].json() == {"exceptions": [], "next": None}
    (told,) = answers[0].json()["exceptions"]
    assert (told["error_type"], told["message"]) == ("KeyError", repr("prompt " + HOSTILE))
    assert 'print(columns["prompt " + HOSTILE])' in told["traceback"]
    page = browse(ui_service.cats, role="viewer")
    page.goto(f"/ui/runs/{run}")
    line = page.locator("[data-died]")
    expect(line).to_contain_text("Your script died with KeyError")
    line.get_by_role("link").click()
    row = page.locator(f"tr[data-exception='{told['id']}']")
    expect(row).to_contain_text("'prompt <img src=x onerror=alert(1)>")
    expect(row.locator("pre")).not_to_be_visible()
    row.get_by_text("Traceback", exact=True).click()
    expect(row.locator("pre")).to_contain_text("sdk_dies.py")
    axe(page)
    theirs = browse(ui_service.dogs)
    theirs.goto("/ui/errors")
    expect(theirs.get_by_text("No script has died")).to_be_visible()


def test_hostile_texts_of_a_client_are_shown_as_texts(browse, ui_service) -> None:
    evil = "</pre></details><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}"
    headers = {"X-API-Key": ui_service.cats.key}
    with httpx.Client(base_url=ui_service.url, headers=headers, timeout=40) as client:
        session = client.post("/api/v1/create_session", json={}).json()["session_id"]
        event = {"event": "UNHANDLED_EXCEPTION", "event_id": evil, **dict.fromkeys(HOSTILE_FIELDS, evil)}
        batch = {"session_id": session, "events": [event], "platform": evil, "sdk_version": evil}
        for _ in range(2):
            assert client.post("/api/v1/telemetry", json=batch).json() == {"status": "accepted"}
    page = browse(ui_service.cats)
    page.goto("/ui/errors")
    row = page.locator("tr", has_text=session)
    expect(row).to_have_count(1)
    expect(row.locator(".badge")).to_have_text(evil)
    row.get_by_text("Traceback", exact=True).click()
    expect(row.locator("pre")).to_have_text(evil)
    expect(row.locator("img, script")).to_have_count(0)
