"""Browsers' reports on the content policy: written to the security log, without what may be secret, and bounded."""

import json

import httpx

from api.dashboard.policy_reports import MOST_REPORTS
from telemetry.security import SecurityEvent
from tests.api.admin.conftest import admin  # noqa: F401 - a fixture
from tests.api.dashboard.visits import SAME, visitor
from tests.api.test_security_log import Noted, noted  # noqa: F401 - a fixture

REPORTS = "/ui/policy-reports"
TYPE = {"content-type": "application/csp-report"}


def report(**changed: object) -> bytes:
    told = {
        "document-uri": "http://127.0.0.1/ui/runs/a?text=private",
        "effective-directive": "img-src",
        "blocked-uri": "https://evil.example/x?stolen=private",
    }
    return json.dumps({"csp-report": told | changed}).encode()


async def test_a_report_is_written_without_what_may_be_secret(service, noted: Noted) -> None:  # noqa: F811
    async with visitor(service) as http:
        policy = (await http.get("/ui/login")).headers["content-security-policy"]
        assert policy.endswith(f"; report-uri {REPORTS}")
        assert (await http.post(REPORTS, content=report(), headers=TYPE)).status_code == 204
        hostile = report(**{"effective-directive": "img-src\n2026 forged line", "blocked-uri": "inline"})
        assert (await http.post(REPORTS, content=hostile, headers=TYPE)).status_code == 204
    first, second = noted.of(SecurityEvent.POLICY_VIOLATED)
    assert (first["detail"], first["source"]) == ("img-src blocked https://evil.example on /ui/runs/a", "127.0.0.1")
    assert "\n" not in second["detail"]
    assert "private" not in noted.text


async def test_what_is_no_report_is_dropped(service, noted: Noted) -> None:  # noqa: F811
    bad = (b"", b"[]", b"{}", b'{"csp-report": 7}', b'{"csp-report": {}}', report(**{"blocked-uri": "http://["}))
    deep = b'{"csp-report": {"effective-directive": ' + b"[" * 1000 + b"]" * 1000 + b"}}"
    async with visitor(service) as http:
        for content in (*bad, b"{" * 100_000, deep):
            assert (await http.post(REPORTS, content=content, headers=TYPE)).status_code == 400, content[:50]
        assert (await http.post(REPORTS, data={"csp-report": "x"})).status_code == 400
        del http.headers["sec-fetch-site"]
        assert (await http.post(REPORTS, content=report(), headers=TYPE)).status_code == 403
    assert noted.of(SecurityEvent.POLICY_VIOLATED) == []


async def test_a_flood_of_reports_is_refused_and_keeps_nobody_else_out(service, cats, noted: Noted) -> None:  # noqa: F811
    elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with httpx.AsyncClient(
        base_url=service.url, timeout=40, headers=SAME | TYPE, transport=elsewhere
    ) as stranger:
        for _ in range(MOST_REPORTS):
            assert (await stranger.post(REPORTS, content=report())).status_code == 204
        assert (await stranger.post(REPORTS, content=report())).status_code == 429
    assert 1 <= len(noted.of(SecurityEvent.POLICY_VIOLATED)) <= 5
    async with visitor(service, cats.key) as http:
        assert (await http.post(REPORTS, content=report(), headers=TYPE)).status_code == 204


async def test_operators_pages_have_reports_of_their_own(admin, noted: Noted) -> None:  # noqa: F811
    async with httpx.AsyncClient(base_url=admin.url, timeout=40, headers=SAME) as http:
        policy = (await http.get("/ops/login")).headers["content-security-policy"]
        assert policy.endswith("; report-uri /ops/policy-reports")
        assert (await http.post("/ops/policy-reports", content=report(), headers=TYPE)).status_code == 204
    assert len(noted.of(SecurityEvent.POLICY_VIOLATED)) == 1
