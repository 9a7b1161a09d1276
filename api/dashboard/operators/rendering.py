"""Pages of operators, with their menu, and their pages of errors."""

from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from api.dashboard.navigation import Entry
from api.dashboard.rendering import page
from contracts.errors import WeftError
from tenants.operator_keys import Operator

OPS = "/ops"
"""Path under which operators' pages are."""
ENTRIES = (
    Entry("Overview", f"{OPS}/overview"),
    Entry("Tenants", f"{OPS}/tenants"),
    Entry("Queue", f"{OPS}/queue"),
    Entry("Replicas", f"{OPS}/replicas"),
    Entry("Processes", f"{OPS}/processes"),
    Entry("Runs", f"{OPS}/runs"),
    Entry("Sessions", f"{OPS}/sessions"),
    Entry("Audit", f"{OPS}/audit"),
    Entry("Browsers", f"{OPS}/browsers"),
    Entry("Housekeeping", f"{OPS}/housekeeping"),
)


def operator_page(
    request: Request, operator: Operator | None, template: str, *, refusal: WeftError | None = None, **values: Any
) -> HTMLResponse:
    """Return a page. ``refusal`` is why the form before it was not carried out: the page says so, with its status."""
    entries = () if operator is None else ENTRIES
    status = 200 if refusal is None else refusal.status
    told = None if refusal is None else refusal.message
    return page(request, template, status=status, operator=operator, entries=entries, refusal=told, **values)
