"""Projects of tenants: made, listed, found by id or name, and given to sessions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from uuid import uuid4

from sqlalchemy import func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import Forbidden, InvalidRequest
from contracts.ids import TenantId
from store.clock import Clock
from store.inserts import insert_unless_present
from store.tables import Project, Session, Tenant
from tenants.limits import Counted, hold_count
from tenants.project_limits import check_not_overfull
from tenants.reach import Owner, Reach, default_project, tenant_of
from tenants.rights import Principal
from tenants.sessions import get_session, is_standing

DEFAULT_NAME = "default"
"""Name of every tenant's default project, which has no row."""
_ID_PREFIX = "proj-"
_LONGEST_NAME = 100
MOST_PROJECTS = 1000
"""Most projects of one tenant beside the default one. They stay for good, and a list has them all."""


@dataclass(frozen=True, slots=True)
class ProjectInfo:
    """A project. ``created_at`` None: the default project, as old as its tenant. ``is_new``: it was made just now."""

    id: str
    name: str
    created_at: datetime | None
    is_new: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)
    """Limits of its own, by name (``tenants.project_limits``)."""


async def create_project(transaction: AsyncSession, tenant: TenantId, name: str, clock: Clock) -> ProjectInfo:
    """Make a project; one of that name is returned as it is.

    Raises ``InvalidRequest`` for a name that is none, and for one project too many.
    """
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise InvalidRequest(f"name: a project's name has 1 to {_LONGEST_NAME} characters, all printable")
    if name.startswith(_ID_PREFIX) or name in (DEFAULT_NAME, default_project(tenant)):
        raise InvalidRequest(f"name: {name!r} is the name of another project, or looks like an id; choose another name")
    query = select(Project).where(Project.tenant_id == tenant, Project.name == name)
    found = await transaction.scalar(query)
    if found is not None:
        return _info(found)
    kept = await transaction.scalar(select(func.count()).select_from(Project).where(Project.tenant_id == tenant)) or 0
    if kept >= MOST_PROJECTS:
        raise InvalidRequest(f"you have {kept} projects, and at most {MOST_PROJECTS} are kept; use one of them")
    made = {"id": f"{_ID_PREFIX}{uuid4().hex}", "tenant_id": tenant, "name": name, "created_at": clock()}
    added = insert_unless_present(transaction, Project).values(made).returning(Project.id)
    is_new = await transaction.scalar(added) is not None
    # Another request may have made one of that name since it was looked for.
    return replace(_info((await transaction.scalars(query)).one()), is_new=is_new)


async def list_projects(session: AsyncSession, owner: Owner) -> list[ProjectInfo]:
    """Return the projects that the owner reaches: the default project first, the others oldest first."""
    tenant = tenant_of(owner)
    rows = await session.scalars(
        select(Project).where(Project.tenant_id == tenant).order_by(Project.created_at, Project.id)
    )
    every = [ProjectInfo(default_project(tenant), DEFAULT_NAME, None), *(_info(row) for row in rows)]
    return [one for one in every if not isinstance(owner, Reach) or one.id in owner.projects]


async def find_projects(session: AsyncSession, owner: Owner, named: Iterable[str]) -> frozenset[str]:
    """Return the ids of projects that are named by id or by name.

    Raises ``Forbidden`` for one that the owner does not reach, in the same words as for one that there is not.
    """
    tenant, wanted = tenant_of(owner), set(named)
    known = {DEFAULT_NAME: default_project(tenant), default_project(tenant): default_project(tenant)}
    if wanted - known.keys():
        which = or_(Project.id.in_(wanted), Project.name.in_(wanted))
        for row in await session.scalars(select(Project).where(Project.tenant_id == tenant, which)):
            known |= {row.id: row.id, row.name: row.id}
    for name in sorted(wanted):
        id = known.get(name)
        if id is None or (isinstance(owner, Reach) and id not in owner.projects):
            if not isinstance(owner, Reach):
                whose = await session.scalar(select(Tenant.name).where(Tenant.id == tenant))
                raise Forbidden(
                    f"tenant {whose} has no project {name[:100]!r}; `weft project list --tenant {whose}` lists its projects, and "
                    "`weft project create` makes one"
                )
            raise Forbidden(
                f"project {name[:100]!r} is none that this key reaches; GET /api/weft/v1/projects lists those, and "
                "`weft project create` makes one"
            )
    return frozenset(known[name] for name in wanted)


def stored_project(tenant: TenantId, project: str) -> str | None:
    """Return the project as rows of ``sessions`` have it: None for the default one."""
    return None if project == default_project(tenant) else project


async def project_of_new(session: AsyncSession, caller: Principal, named: str | None) -> str | None:
    """Return the project of a new session as its row has it: the named one, or the one that the key is for.

    Raises ``Forbidden``.
    """
    if not named:
        return caller.home_project
    (project,) = await find_projects(session, caller.reach, [named])
    return stored_project(caller.tenant, project)


async def assign_project(
    transaction: AsyncSession, owner: Owner, session_id: str, named: str, *, may_overfill: bool = True
) -> tuple[str, str]:
    """Move a session, with its runs and samplers, to a project; return the project before and that one.

    Raises ``NotFound``, ``Forbidden`` for the project, and unless ``may_overfill`` for one whose limits the session does not fit
    into, ``InvalidRequest`` for a session of the service's own.
    """
    found = await get_session(transaction, owner, session_id)
    if is_standing(found):
        raise InvalidRequest(
            "this session serves OpenAI clients of its project, and stays there; move a session of your own"
        )
    before = found.project or default_project(tenant_of(owner))
    (project,) = await find_projects(transaction, owner, [named])
    moved = update(Session).where(Session.id == found.id).values(project=stored_project(tenant_of(owner), project))
    if not may_overfill:
        # Moves come one after the other, so that each counts those before it.
        await hold_count(transaction, Counted.SESSIONS, [tenant_of(owner)])
    await transaction.execute(moved.execution_options(synchronize_session=False))
    if not may_overfill:
        await check_not_overfull(transaction, tenant_of(owner), project, session_id)
    return before, project


def _info(row: Project) -> ProjectInfo:
    return ProjectInfo(row.id, row.name, row.created_at, limits=row.limits or {})
