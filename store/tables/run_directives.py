"""Table of operators' directives for runs."""

from datetime import datetime

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class DirectedRun(Base):
    """An operator's directive for a run, deleted once its trainer has carried it out.

    - ``wanted``: ``move`` or ``evict``.
    - ``target``: trainer that is to get a moved run; None: whichever takes it.
    """

    __tablename__ = "directed_runs"

    run_id: Mapped[str] = mapped_column(String(100), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    wanted: Mapped[str] = mapped_column(String(8))
    target: Mapped[str | None] = mapped_column(String(64))
    reason: Mapped[str | None] = mapped_column(String(500))
    since: Mapped[datetime]
