"""The security log: what an auditor asks for is noted, without secrets, and nobody can flood it."""

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from telemetry.logs import JsonFormatter
from telemetry.security import LOGGER, SampledRecords, SecurityEvent, SecurityRecord

CHECKPOINT = "checkpoints/weights/ck1"


@dataclass
class Noted:
    """Return the records written so far, as JSON lines."""

    stream: io.StringIO

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def of(self, event: SecurityEvent) -> list[dict[str, Any]]:
        lines = (json.loads(line)["security"] for line in self.text.splitlines())
        return [line for line in lines if line["event"] == event]


@pytest.fixture
def noted() -> Iterator[Noted]:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(JsonFormatter("api"))
    logger = logging.getLogger(LOGGER)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield Noted(handler.stream)
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_a_flood_of_refused_keys_is_noted_and_bounded(service, dogs, noted: Noted) -> None:
    guess = "tml-0123456789ab-" + "g" * 43
    async with httpx.AsyncClient(base_url=f"{service.url}/api/v1", timeout=40) as http:
        for _ in range(20):
            assert (await http.get("/training_runs", headers={"X-API-Key": guess})).status_code == 401
    lines = noted.of(SecurityEvent.KEY_REFUSED)
    assert 1 <= len(lines) <= 5
    assert lines[0]["source"] == "127.0.0.1"
    assert lines[0]["actor"] == "tml-0123456789ab"
    assert "g" * 20 not in noted.text
    assert (await dogs.http.get("/training_runs")).status_code == 200


async def test_keys_of_other_services_are_not_noted(service, noted: Noted) -> None:
    async with httpx.AsyncClient(base_url=f"{service.url}/api/v1", timeout=40) as http:
        await http.get("/training_runs", headers={"Authorization": "Bearer sk-of-somebody-else"})
    (line,) = noted.of(SecurityEvent.KEY_REFUSED)
    assert "actor" not in line
    assert "sk-of" not in noted.text


async def test_another_tenants_id_is_noted_as_such(cats, dogs, noted: Noted) -> None:
    theirs = await dogs.operation(await dogs.run())
    asked = await cats.http.post("/retrieve_future", json={"request_id": theirs})
    assert asked.status_code == 404
    (line,) = noted.of(SecurityEvent.FOREIGN_ID)
    assert line["tenant"] == cats.id
    assert (await cats.http.post("/retrieve_future", json={"request_id": "nothing"})).json() == {
        **asked.json(),
        "detail": "no request 'nothing'",
    }
    assert [line["tenant"] for line in noted.of(SecurityEvent.NOT_FOUND)] == [cats.id]


async def test_links_and_downloads_are_noted_without_the_links_secret(cats, noted: Noted) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "ck1")
    link = (await cats.http.get(f"/training_runs/{run}/{CHECKPOINT}/archive")).headers["location"]
    async with httpx.AsyncClient(timeout=40) as stranger:
        (await stranger.get(link)).raise_for_status()
        assert (await stranger.get(link.replace("downloads/", "downloads/x"))).status_code == 404
    (made,), (fetched,) = noted.of(SecurityEvent.LINK_MADE), noted.of(SecurityEvent.DOWNLOADED)
    assert (made["tenant"], made["resource"]) == (cats.id, f"tinker://{run}/weights/ck1")
    assert fetched["resource"].endswith("/archive.tar")
    assert len(noted.of(SecurityEvent.NOT_FOUND)) == 1
    assert link.split("/")[-2] not in noted.text


async def test_a_key_revoked_by_its_owner_is_noted_without_its_secret(cats, noted: Noted) -> None:
    assert (await cats.http.delete("/auth/apikey/me")).status_code == 204
    (line,) = noted.of(SecurityEvent.KEY_REVOKED)
    assert (line["tenant"], line["actor"]) == (cats.id, cats.key[:16])
    assert len(line["trace_id"]) == 32
    assert cats.key not in noted.text


def test_what_sampling_leaves_out_is_counted_and_everything_ends_with_the_minute(noted: Noted) -> None:
    now = 0.0
    sampled = SampledRecords(lambda: now)
    for number in range(5000):
        source = f"10.0.{number % 500 // 256}.{number % 256}"
        sampled.note(SecurityRecord(event=SecurityEvent.KEY_REFUSED, outcome="refused", source=source))
    written = len(noted.of(SecurityEvent.KEY_REFUSED))
    assert written == 300
    now = 61.0
    sampled.note(SecurityRecord(event=SecurityEvent.KEY_REFUSED, outcome="refused", source="10.0.0.1"))
    summary, last = noted.of(SecurityEvent.KEY_REFUSED)[written:]
    assert (summary["unwritten"], last["source"]) == (str(5000 - written), "10.0.0.1")


def test_a_forged_value_begins_no_line_of_its_own(noted: Noted) -> None:
    sampled = SampledRecords()
    detail = "GET /x\nlevel=info event=key_revoked"
    sampled.note(SecurityRecord(event=SecurityEvent.NOT_FOUND, outcome="refused", detail=detail))
    (line,) = noted.text.splitlines()
    assert "\\n" in json.loads(line)["message"]
