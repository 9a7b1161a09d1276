"""Alerts of all tenants' budgets, for operators: the newest first, in pages."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from sqlalchemy import literal, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import Tenant
from store.tables.base import UtcDateTime
from tenants.budget_settings import Alert, alert_of, known_budgets
from tenants.budgets import BUDGET_ID
from tenants.spending import alerts
from tenants.text_cursors import cursor_of, values_of, wrong_cursor

_KEY = (*(alerts.c[column.name] for column in BUDGET_ID), alerts.c.period_end, alerts.c.percent)


@dataclass(frozen=True, slots=True)
class AlertPlace:
    """Place of an alert in the list: its time, and the key of its row."""

    at: datetime
    key: tuple[str, ...]
    percent: int

    @property
    def cursor(self) -> str:
        """Cursor of the page that begins behind this place."""
        return cursor_of(self.at.isoformat(), *self.key, str(self.percent))

    @classmethod
    def parse(cls, cursor: str) -> Self:
        """Return the place that a cursor names. Raises ``InvalidRequest``."""
        at, *key, percent = values_of(cursor, len(_KEY) + 1)
        try:
            time, number = datetime.fromisoformat(at), int(percent)
        except ValueError as error:
            raise wrong_cursor() from error
        if time.tzinfo is None or not 0 <= number <= 100:
            raise wrong_cursor()
        return cls(time, tuple(key), number)


@dataclass(frozen=True, slots=True)
class TenantsAlert:
    """An alert of a tenant's budget, with the tenant's id and name."""

    tenant_id: str
    tenant: str
    alert: Alert
    place: AlertPlace


async def list_alerts(
    session: AsyncSession, *, tenant_id: str | None, after: AlertPlace | None, most: int
) -> list[TenantsAlert]:
    """Return at most ``most`` alerts behind a place, the newest first: of every tenant, or of one.

    Alerts of budgets with a scope or a period that only another version knows are left out.
    """
    query = select(alerts, Tenant.name).join(Tenant, Tenant.id == alerts.c.tenant_id).where(*known_budgets(alerts))
    if tenant_id is not None:
        query = query.where(alerts.c.tenant_id == tenant_id)
    if after is not None:
        at = literal(after.at, UtcDateTime())
        place = tuple_(at, *map(literal, after.key), literal(after.percent))
        # The time alone as well: the index is over it.
        query = query.where(alerts.c.at <= at, tuple_(alerts.c.at, *_KEY) < place)
    newest = query.order_by(alerts.c.at.desc(), *(column.desc() for column in _KEY)).limit(most)
    return [_told(row) for row in await session.execute(newest)]


def _told(row: Any) -> TenantsAlert:
    *key, percent = (getattr(row, column.name) for column in _KEY)
    return TenantsAlert(row.tenant_id, row.name, alert_of(row), AlertPlace(row.at, tuple(key), percent))
