"""A page that is left open: what it asks for by itself is no use of its session, which ends idle; a person's click is one."""

import asyncio
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from sqlalchemy import select

from api.dashboard.app import create_dashboard
from api.dashboard.operators.app import create_operator_pages
from api.dashboard.unattended import mark_unattended
from store.tables import ApiKey, WebSession
from tests.api.dashboard.visits import key_of, visitor
from tests.conftest import ROOT

TEMPLATES = ROOT / "api" / "dashboard" / "templates"
BY_SCRIPTS = {
    "/ui/adapters/{run_id}/state",
    "/ui/runs/live",
    "/ui/runs/{run_id}/curve/now",
    "/ui/runs/{run_id}/events",
    "/ui/runs/{run_id}/news",
}
"""Routes that scripts of pages ask for without a person: of the playground, the list of runs, and a run's page."""
_POLL = re.compile(r'hx-get="([^"]*)" hx-trigger="every ')
_ROW = re.compile(r"<tr\b(?![^>]*data-key=)[^>]*>")
_INCLUDE = re.compile(r'{% include "([^"]*)" %}')


def _routes(app: FastAPI) -> Iterator[tuple[str, APIRoute]]:
    for context in iter_route_contexts(app.routes):
        route = context.original_route if hasattr(context, "original_route") else context.route
        if isinstance(route, APIRoute):
            yield context.path or "", route


def _unattended(app: FastAPI) -> set[str]:
    return {path for path, route in _routes(app) if mark_unattended in [one.dependency for one in route.dependencies]}


def _polled() -> Iterator[tuple[Path, str, re.Pattern[str]]]:
    """Yield each poll of a template: the template, what follows the poll there, and a pattern of its route's path."""
    for template in sorted(TEMPLATES.rglob("*.html")):
        text = template.read_text()
        for found in _POLL.finditer(text):
            address = found[1].replace("{{ address }}", "/ui/webhooks/{{ name }}")
            path = re.split(r"\?|{%|{{ '\?", address)[0]
            parts = [r"\{\w+\}" if part.startswith("{{") else re.escape(part) for part in re.split("({{.*?}})", path)]
            yield template, text[found.end() :], re.compile("".join(parts))


async def test_what_a_template_polls_is_a_route_that_counts_as_no_use_and_nothing_else_is(service) -> None:
    polled = [pattern for _, _, pattern in _polled()]
    assert len(polled) >= 10
    marked = _unattended(create_dashboard(service.services)) | _unattended(create_operator_pages(service.services))
    for pattern in polled:
        assert [one for one in marked if pattern.fullmatch(one)], f"{pattern.pattern} is polled, and counts as use"
    by_scripts = {path for path in marked if not any(one.fullmatch(path) for one in polled)}
    assert by_scripts == BY_SCRIPTS


def test_rows_of_what_is_polled_have_keys_by_which_they_are_kept() -> None:
    """Without one a row becomes the next one's, with its focus and its opened details, as soon as a row is above it."""
    for _, rest, _ in _polled():
        parts = [_INCLUDE.findall(rest)[0]]
        for part in parts:
            text = (TEMPLATES / part).read_text()
            parts += _INCLUDE.findall(text)
            assert _ROW.findall(text) == [], part


@pytest.fixture
async def open_pages(cats) -> list[str]:
    """Addresses that open pages of ``cats`` go on to ask for."""
    run = await cats.run()
    return [
        "/ui/parts/overview",
        "/ui/adapters/table",
        f"/ui/adapters/{run}/panel",
        f"/ui/adapters/{run}/state",
        "/ui/queue/table",
        "/ui/runs/live",
        f"/ui/runs/{run}/news",
        f"/ui/runs/{run}/curve/now",
    ]


async def test_a_page_that_is_only_left_open_ends_idle_and_a_persons_click_keeps_it(
    service, cats, dogs, open_pages
) -> None:
    key = await key_of(service, cats)
    async with (
        visitor(service, key.secret) as left,
        visitor(service, cats.key) as clicking,
        visitor(service, dogs.key) as other,
    ):
        for _ in range(4):
            service.clock.move(hours=2)
            for path in open_pages:
                assert (await left.get(path)).status_code == (200 if _ < 3 else 303), path
                assert (await clicking.get(path)).status_code == 200, path
            assert (await clicking.get("/ui/queue")).status_code == 200
            assert (await other.get("/ui")).status_code == 200
        part = await left.get("/ui/queue/table", headers={"hx-request": "true"})
        assert (part.status_code, part.headers["hx-redirect"]) == (401, "/ui/login")
        assert (await left.get("/ui")).status_code == 303


async def test_a_stream_ends_when_its_session_was_used_by_nobody_else_for_the_idle_time(service, cats, dogs) -> None:
    key, run = await key_of(service, cats), await cats.run()
    async with visitor(service, key.secret) as left, visitor(service, dogs.key) as other, asyncio.timeout(60):
        service.clock.move(hours=6)
        assert (await other.get("/ui")).status_code == 200
        async with left.stream("GET", f"/ui/runs/{run}/events") as stream:
            lines = stream.aiter_lines()
            assert await anext(lines) == "retry: 1000"
            service.clock.move(hours=2)
            assert "event: displaced" not in [line async for line in lines]
        assert (await left.get(f"/ui/runs/{run}/events")).status_code == 303
        assert (await other.get("/ui")).status_code == 200


async def test_what_a_page_asks_for_by_itself_is_no_use_of_the_key_either(service, cats) -> None:
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as left:
        begun = service.clock()
        service.clock.move(hours=2)
        assert (await left.get("/ui/queue/table")).status_code == 200
        await service.services.key_uses.write()
        async with service.database.read() as session:
            seen = await session.scalar(select(WebSession.seen_at).where(WebSession.key_id == key.id))
            used = await session.scalar(select(ApiKey.last_used_at).where(ApiKey.id == key.id))
        assert seen == begun
        assert used is None or used <= begun + timedelta(minutes=1)
