"""Table of tenants' projects."""

from datetime import datetime

from sqlalchemy import JSON, ForeignKey, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class Project(Base):
    """A part of a tenant's work: sessions, and the runs and samplers in them.

    Every tenant also has a default project without a row. Sessions that name no project are in it. ``limits`` has the values
    of its own, by name (``tenants.project_limits``); None: it has its tenant's limits alone.
    """

    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(100))
    created_at: Mapped[datetime]
    limits: Mapped[dict[str, int] | None] = mapped_column(JSON(none_as_null=True))

    __table_args__ = (UniqueConstraint("tenant_id", "name"),)
