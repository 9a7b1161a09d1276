"""Endpoints of a tenant's projects: list, make, and bound."""

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel

from api.acting import record_act
from api.authentication import ProjectAdmin, ProjectReader
from api.json_body import json_body
from api.project_records import NewProject, NewProjectLimits, ProjectBody, project_body
from api.services import Services
from api.wire.request_model import NO_NUL
from contracts.errors import Forbidden
from tenants.audit_actions import Action
from tenants.project_limits import set_project_limits
from tenants.projects import create_project, list_projects

router = APIRouter(tags=["projects"])


class ProjectList(BaseModel):
    """Projects, the default one first."""

    projects: list[ProjectBody]


@router.get("/projects")
async def list_own_projects(caller: ProjectReader, services: Services) -> ProjectList:
    """List the projects that the key reaches."""
    async with services.runtime.database.read() as session:
        found = await list_projects(session, caller.reach)
    return ProjectList(projects=[project_body(one) for one in found])


@router.post("/projects")
async def make_project(
    caller: ProjectAdmin, services: Services, body: Annotated[NewProject, json_body(NewProject)]
) -> ProjectBody:
    """Make a project; a repeat finds the first one. Raises ``InvalidRequest``, ``Forbidden`` for a key of some projects."""
    if caller.projects is not None:
        raise Forbidden("this key is for some projects, and a new one is none of them; use a key without that bound")
    async with services.runtime.database.write() as transaction:
        made = await create_project(transaction, caller.tenant, body.name, services.runtime.clock)
        if made.is_new:
            told = {"name": made.name}
            await record_act(transaction, services, caller, Action.PROJECT_CREATE, made.id, project=made.id, after=told)
    return project_body(made)


@router.put("/projects/{project:path}/limits")
async def change_project_limits(
    caller: ProjectAdmin,
    services: Services,
    project: Annotated[str, Path(pattern=NO_NUL, max_length=100)],
    body: Annotated[NewProjectLimits, json_body(NewProjectLimits)],
) -> ProjectBody:
    """Give a project, by its id or name, limits of its own, within the tenant's. They hold from its next request on.

    Raises ``NotFound``, ``InvalidRequest`` for a limit that is none, ``Forbidden`` for a key of some projects.
    """
    if caller.projects is not None:
        raise Forbidden(
            "this key is for some projects, and may not change how much they use; use a key without that bound"
        )
    async with services.runtime.database.write() as transaction:
        changed = await set_project_limits(transaction, caller.tenant, project, body.limits, services.runtime.clock)
        await record_act(
            transaction,
            services,
            caller,
            Action.PROJECT_SET,
            changed.id,
            project=changed.id,
            before={"limits": changed.before},
            after={"limits": changed.limits},
        )
    return project_body(changed)
