"""Page of the queue: what is pending of each base model and kind, how old it is, and which tenants fill it."""

from fastapi import APIRouter, Request, Response

from api.admin.operations import list_all_operations
from api.admin.queue import show_queue
from api.admin.services import Admin
from api.dashboard.operators.rendering import operator_page
from api.dashboard.operators.session import PageOperator
from api.dashboard.unattended import UNATTENDED

router = APIRouter()


@router.get("/queue")
async def queue_page(operator: PageOperator, admin: Admin, request: Request) -> Response:
    """Show the queue, with its oldest operations and why they wait."""
    lines = (await show_queue(operator, admin)).items
    oldest = (await list_all_operations(operator, admin, limit=20)).items
    return operator_page(request, operator, "operators/queue.html", lines=lines, oldest=oldest)


@router.get("/queue/now", dependencies=[UNATTENDED])
async def queue_fragment(operator: PageOperator, admin: Admin, request: Request) -> Response:
    """Return the queue's lines, which change."""
    lines = (await show_queue(operator, admin)).items
    return operator_page(request, operator, "operators/queue_now.html", lines=lines)
