"""Tables of housekeeping: its steps' last runs, and whether the service answers its clients."""

from datetime import datetime

from sqlalchemy import BigInteger, Float, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class StepRun(Base):
    """A step's last run.

    - ``position``: where the next run goes on; None begins anew.
    - ``handled``: rows that the run deleted or changed.
    - ``behind_since``: end of the first of the runs in a row that left work over; None when the last one left none.
    - ``failing_since``: end of the first of the runs in a row that failed; None when the last one succeeded.
    """

    __tablename__ = "housekeeping_steps"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    ended_at: Mapped[datetime]
    succeeded_at: Mapped[datetime | None]
    seconds: Mapped[float] = mapped_column(Float)
    handled: Mapped[int] = mapped_column(BigInteger)
    position: Mapped[str | None] = mapped_column(String(200))
    behind_since: Mapped[datetime | None]
    failing_since: Mapped[datetime | None]


class ServicePresence(Base):
    """One row, number 1: when an API process last said that clients can reach it.

    ``back_at`` is the end of the last silence of all API processes. No client could send a heartbeat before.
    ``storage_metered_to``: end of the hours whose storage is recorded.
    ``data_folder``: mark of the data folder that rows name files of (``store.folder_mark``).
    """

    __tablename__ = "service_presence"

    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    present_at: Mapped[datetime]
    back_at: Mapped[datetime]
    storage_metered_to: Mapped[datetime | None]
    data_folder: Mapped[str | None] = mapped_column(String(32))
