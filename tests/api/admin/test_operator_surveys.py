"""Sums that operators ask for are surveys: they wait for the service's own ones, and no tenant's list for them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import event

from store.clock import utc_now
from store.fair_places import OWN_WORK, ask_for
from store.surveys import Surveys
from tenants.price_additions import NewPrice, add_price
from tenants.prices import PricedQuantity
from tests.api.admin.conftest import Admin
from tests.api.admin.test_money_pages import operator
from tests.api.conftest import Tenant
from tests.api.test_surveys import LONG, until_waiting

SUMS = ("/admin/v1/overview", "/admin/v1/shares", "/admin/v1/queue", "/ops/tenants", "/ops/tenants/now")
PAGES = "/ops/"


@contextmanager
def surveyed(surveys: Surveys) -> Iterator[list[str]]:
    """Collect the statements of surveys."""
    found: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        found.append(statement)

    event.listen(surveys.engine.sync_engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(surveys.engine.sync_engine, "before_cursor_execute", note)


async def test_operators_sums_wait_for_the_services_own_surveys_alone(admin: Admin, cats: Tenant, dogs: Tenant) -> None:
    surveys = admin.service.database.surveys
    assert surveys is not None
    async with operator(admin) as pages:
        for path in SUMS:
            http = pages if path.startswith(PAGES) else admin.http
            ask_for(OWN_WORK)
            async with surveys.places.place():
                waiting = asyncio.create_task(http.get(admin.url + path))
                await until_waiting(admin.service, waiting, path)
                assert (await asyncio.wait_for(dogs.http.get("/training_runs"), LONG)).status_code == 200
                assert not waiting.done()
            assert (await asyncio.wait_for(waiting, LONG)).status_code == 200, path
            ask_for(cats.id)
            async with surveys.places.place():
                assert (await asyncio.wait_for(http.get(admin.url + path), LONG)).status_code == 200, path


async def test_what_tenants_have_spent_today_is_added_up_by_a_survey(admin: Admin, cats: Tenant, dogs: Tenant) -> None:
    surveys = admin.service.database.surveys
    assert surveys is not None
    async with admin.service.database.write() as transaction:
        await add_price(transaction, NewPrice(PricedQuantity.TRAIN_TOKENS, "1", "USD"), utc_now)
    async with operator(admin) as pages:
        with surveyed(surveys) as statements:
            assert (await pages.get("/ops/tenants")).status_code == 200
    assert any("usage_hours" in one for one in statements)
