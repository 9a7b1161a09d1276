"""Endpoints of a tenant's projects: list and make."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.authentication import ProjectAdmin, ProjectReader
from api.json_body import json_body
from api.services import Services
from api.wire.request_model import PlainText, RequestModel
from contracts.errors import Forbidden
from tenants.projects import ProjectInfo, create_project, list_projects

router = APIRouter(tags=["projects"])


class NewProject(RequestModel):
    """Name of a project to make."""

    name: Annotated[PlainText, Field(max_length=100)]


class ProjectBody(BaseModel):
    """A project. ``id`` or ``name`` is what clients send as ``project_id``; ``created_at`` is null for the default one."""

    id: str
    name: str
    created_at: datetime | None


class ProjectList(BaseModel):
    """Projects, the default one first."""

    projects: list[ProjectBody]


@router.get("/projects")
async def list_own_projects(caller: ProjectReader, services: Services) -> ProjectList:
    """List the projects that the key reaches."""
    async with services.runtime.database.read() as session:
        found = await list_projects(session, caller.reach)
    return ProjectList(projects=[_body(one) for one in found])


@router.post("/projects")
async def make_project(
    caller: ProjectAdmin, services: Services, body: Annotated[NewProject, json_body(NewProject)]
) -> ProjectBody:
    """Make a project; a repeat finds the first one. Raises ``InvalidRequest``, ``Forbidden`` for a key of some projects."""
    if caller.projects is not None:
        raise Forbidden("this key is for some projects, and a new one is none of them; use a key without that bound")
    async with services.runtime.database.write() as transaction:
        made = await create_project(transaction, caller.tenant, body.name, services.runtime.clock)
    return _body(made)


def _body(project: ProjectInfo) -> ProjectBody:
    return ProjectBody(id=project.id, name=project.name, created_at=project.created_at)
