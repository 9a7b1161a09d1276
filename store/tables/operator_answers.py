"""Table of answers to operators' changes, by which repeats of them are known."""

from datetime import datetime

from sqlalchemy import String, Text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class OperatorAnswer(Base):
    """Answer to a change that was sent with an ``Idempotency-Key``.

    - ``id``: digest of the operator and the key. ``asked``: digest of what was asked for.
    - ``answer``: the answer's JSON, written with the change.
    """

    __tablename__ = "operator_answers"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    asked: Mapped[str] = mapped_column(String(64))
    answer: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime] = mapped_column(index=True)
