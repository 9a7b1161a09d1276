"""Projects as they are told, and what is asked of them."""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, Field

from api.wire.request_model import PlainText, RequestModel
from tenants.project_limits import ProjectChange
from tenants.projects import ProjectInfo


class NewProject(RequestModel):
    """Name of a project to make."""

    name: Annotated[PlainText, Field(max_length=100)]


class NewProjectLimits(RequestModel):
    """Limits to set, by name; null for none. Those that are not named stay."""

    limits: Annotated[dict[Annotated[str, Field(max_length=100)], int | None], Field(max_length=100)]


class ProjectBody(BaseModel):
    """A project. ``id`` or ``name`` is what clients send as ``project_id``; ``created_at`` is null for the default one."""

    id: str
    name: str
    created_at: datetime | None
    limits: dict[str, int]


def project_body(project: ProjectInfo | ProjectChange) -> ProjectBody:
    """Return a project as it is told."""
    return ProjectBody(id=project.id, name=project.name, created_at=project.created_at, limits=dict(project.limits))
