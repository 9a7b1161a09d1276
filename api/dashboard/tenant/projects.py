"""Projects of a tenant: list and make them."""

from fastapi import APIRouter, Request, Response

from api.dashboard.forms import Form, parsed, see
from api.dashboard.rendering import page
from api.dashboard.web_session import PageProjectAdmin, PageProjectReader
from api.project_records import NewProject
from api.services import ApiServices, Services
from api.weft.projects import list_own_projects
from api.weft.projects import make_project as make
from contracts.errors import WeftError
from tenants.rights import Principal

router = APIRouter(tags=["projects"])


@router.get("/projects")
async def projects(caller: PageProjectReader, services: Services, request: Request) -> Response:
    """List the projects that the caller reaches."""
    return await _shown(request, services, caller)


@router.post("/projects")
async def make_project(caller: PageProjectAdmin, services: Services, request: Request, form: Form) -> Response:
    """Make a project."""
    try:
        await make(caller, services, parsed(NewProject, {"name": form.get("name", "").strip()}))
    except WeftError as error:
        return await _shown(request, services, caller, problem=error)
    return see("/ui/projects")


async def _shown(
    request: Request, services: ApiServices, caller: Principal, problem: WeftError | None = None
) -> Response:
    return page(
        request,
        "tenant/projects.html",
        status=200 if problem is None else problem.status,
        projects=(await list_own_projects(caller, services)).projects,
        problem="" if problem is None else problem.message,
    )
