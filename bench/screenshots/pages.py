"""The dashboard's pages, read from its routes, and their addresses, read from the links of pages before them."""

import re
from collections.abc import Iterable
from unittest.mock import create_autospec

from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from playwright.sync_api import Page

from api.admin.services import AdminServices
from api.dashboard.app import create_dashboard
from api.dashboard.operators.app import create_operator_pages
from api.services import ApiServices

_PARAMETER = re.compile(r"\{[^}:]+(:path)?\}")
_COMPARISON = "/ui/runs/compare"
_RUN = re.compile(r"/ui/runs/([^/?#]+%3A[^/?#]+|[^/?#]+:[^/?#]+)")


def tenant_pages() -> list[str]:
    """Return the templates of the tenants' addresses that a browser may open."""
    return templates(create_dashboard(create_autospec(ApiServices, instance=True)))


def operator_pages() -> list[str]:
    """Return the templates of the operators' addresses that a browser may open."""
    return templates(create_operator_pages(create_autospec(AdminServices, instance=True)))


def templates(app: FastAPI) -> list[str]:
    """Return the templates of the application's addresses, but for files and parts of pages."""
    found = set()
    for context in iter_route_contexts(app.routes):
        route = context.original_route if hasattr(context, "original_route") else context.route
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            found.add(context.path or "")
    return sorted(one for one in found if "/static/" not in one)


def address(template: str, links: Iterable[str]) -> str | None:
    """Return an address of the template: itself, or the first of ``links`` that is one. None if no link is.

    The address of a comparison names the first two runs among ``links``.
    """
    if template == _COMPARISON:
        runs = dict.fromkeys(found[1] for link in links if (found := _RUN.fullmatch(link)))
        return f"{template}?{'&'.join(f'run={run}' for run in list(runs)[:2])}" if len(runs) > 1 else None
    if "{" not in template:
        return template
    pattern = re.compile(_pattern(template))
    return next((link for link in links if pattern.fullmatch(link)), None)


def _pattern(template: str) -> str:
    parts, at = [], 0
    for found in _PARAMETER.finditer(template):
        parts += [re.escape(template[at : found.start()]), ".+" if found[1] else "[^/?#]+"]
        at = found.end()
    return "".join([*parts, re.escape(template[at:])])


def name_of(template: str) -> str:
    """Return the name of the page's picture."""
    return re.sub(r"[^a-z0-9]+", "-", template.lower()).strip("-")


def is_page(page: Page, path: str) -> bool:
    """Return whether the address answers with a whole page: no part, stream, table of values or redirection.

    ``page`` is one of the same origin. Raises ``RuntimeError`` for an error.
    """
    read = """async (path) => {
      const stop = new AbortController();
      const answer = await fetch(path, {redirect: 'manual', signal: stop.signal});
      const isHtml = (answer.headers.get('content-type') || '').startsWith('text/html');
      const isPage = answer.status === 200 && isHtml && (await answer.text()).includes('<!doctype html>');
      stop.abort();
      return [isPage, answer.status];
    }"""
    is_page, status = page.evaluate(read, path)
    if status >= 400:
        raise RuntimeError(f"{path} answers {status}")
    return bool(is_page)
