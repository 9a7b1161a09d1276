"""Page of the whole service at one glance: load, queue, processes and replicas. A fragment of it is fetched every 2 s."""

from fastapi import APIRouter, Request, Response

from api.admin.overview import show_overview
from api.admin.services import Admin
from api.dashboard.operators.rendering import operator_page
from api.dashboard.operators.session import PageOperator
from api.dashboard.unattended import UNATTENDED

router = APIRouter()

_WINDOW_SECONDS = 60


@router.get("/overview")
async def overview_page(operator: PageOperator, admin: Admin, request: Request) -> Response:
    """Show the service now."""
    seen = await show_overview(operator, admin, _WINDOW_SECONDS)
    return operator_page(request, operator, "operators/overview.html", seen=seen)


@router.get("/overview/now", dependencies=[UNATTENDED])
async def overview_fragment(operator: PageOperator, admin: Admin, request: Request) -> Response:
    """Return the part of the page that changes."""
    seen = await show_overview(operator, admin, _WINDOW_SECONDS)
    return operator_page(request, operator, "operators/overview_now.html", seen=seen)
