"""Projects of tenants for operators: list, make and bound them."""

from typing import Annotated

from fastapi import APIRouter, Request

from api.admin.acts import record_operator
from api.admin.bodies import Listed, PathId, operator_body
from api.admin.services import Admin, Caller
from api.admin.tenants import find_row
from api.project_records import NewProject, NewProjectLimits, ProjectBody, project_body
from contracts.ids import TenantId
from tenants.audit_actions import Action
from tenants.project_limits import set_project_limits
from tenants.projects import create_project, list_projects

router = APIRouter(tags=["projects"])


@router.get("/tenants/{tenant_id}/projects")
async def list_tenants_projects(caller: Caller, admin: Admin, tenant_id: PathId) -> Listed[ProjectBody]:
    """List a tenant's projects, the default one first; all in one page. Raises ``NotFound``."""
    del caller
    async with admin.runtime.database.read() as session:
        tenant = TenantId((await find_row(session, tenant_id)).id)
        found = await list_projects(session, tenant)
    return Listed(items=[project_body(one) for one in found])


@router.post("/tenants/{tenant_id}/projects")
async def make_project(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    body: Annotated[NewProject, operator_body(NewProject)],
) -> ProjectBody:
    """Make a project of a tenant; a repeat finds the first one. Raises ``NotFound``, ``InvalidRequest``."""
    async with admin.runtime.database.write() as transaction:
        tenant = TenantId((await find_row(transaction, tenant_id, for_change=True)).id)
        made = await create_project(transaction, tenant, body.name, admin.runtime.clock)
        if made.is_new:
            told = {"name": made.name}
            await record_operator(
                transaction,
                admin,
                request,
                caller,
                Action.PROJECT_CREATE,
                made.id,
                tenant=tenant,
                project=made.id,
                after=told,
            )
        return project_body(made)


@router.put("/tenants/{tenant_id}/projects/{project:path}/limits")
async def change_project_limits(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    project: PathId,
    body: Annotated[NewProjectLimits, operator_body(NewProjectLimits)],
) -> ProjectBody:
    """Give a project, by its id or name, limits within its tenant's. They hold from its next request on.

    Raises ``NotFound``, ``InvalidRequest``.
    """
    async with admin.runtime.database.write() as transaction:
        tenant = TenantId((await find_row(transaction, tenant_id, for_change=True)).id)
        changed = await set_project_limits(transaction, tenant, project, body.limits, admin.runtime.clock)
        await record_operator(
            transaction,
            admin,
            request,
            caller,
            Action.PROJECT_SET,
            changed.id,
            tenant=tenant,
            project=changed.id,
            before={"limits": changed.before},
            after={"limits": changed.limits},
        )
        return project_body(changed)
