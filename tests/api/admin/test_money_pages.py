"""Pages tell what money is spent today and which budgets have crossed a mark: each tenant its own, operators everybody's."""

import re
from contextlib import asynccontextmanager
from decimal import Decimal

import httpx

from store.clock import utc_now
from tenants.budget_settings import BudgetName, set_budget
from tenants.budgets import Period
from tenants.price_additions import NewPrice, add_price
from tenants.prices import PricedQuantity
from tenants.projects import create_project
from tenants.spending import Spender, Spending, spend
from tests.api.admin.conftest import Admin
from tests.api.admin.test_operator_pages import OWN
from tests.api.admin.test_shares import end
from tests.api.conftest import BASE, Tenant
from tests.api.dashboard.visits import visitor

_ALERT = re.compile(r'<tr data-alert="(\d+)"[^>]*>(.*?)</tr>', re.DOTALL)


@asynccontextmanager
async def operator(admin: Admin):
    """Open a client that is logged in as the operator."""
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        begun = await http.post("/ops/login", data={"key": admin.key.secret}, headers=OWN)
        http.headers["Cookie"] = begun.headers["set-cookie"].partition(";")[0]
        yield http


def costs(page: str) -> dict[str, str]:
    """Return what each tenant of the page has spent today."""
    rows = re.findall(r'<tr data-tenant="(\w+)".*?</tr>', page, re.DOTALL)
    found = re.findall(r'<tr data-tenant="(\w+)"(?:(?!</tr>).)*?data-cost="([^"]*)"', page, re.DOTALL)
    assert len(rows) == 2
    return dict(found)


async def test_operators_see_what_each_tenant_has_spent_today_at_its_own_prices(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    await end(admin, await cats.operation(await cats.run()), tokens=600, minutes_ago=0)
    async with operator(admin) as http:
        assert costs((await http.get("/ops/tenants")).text) == {}
        async with admin.service.database.write() as transaction:
            await add_price(transaction, NewPrice(PricedQuantity.TRAIN_TOKENS, "2000000", "USD"), utc_now)
            await add_price(
                transaction, NewPrice(PricedQuantity.TRAIN_TOKENS, "500000", "USD", tenant=dogs.id), utc_now
            )
        for path in ("/ops/tenants", "/ops/tenants/now"):
            assert costs((await http.get(path)).text) == {"cats": "1200", "dogs": "0"}
        await end(admin, await dogs.operation(await dogs.run()), tokens=3, minutes_ago=0)
        page = (await http.get("/ops/tenants/now")).text
        assert costs(page) == {"cats": "1200", "dogs": "1.5"}
        assert "1.5 USD" in page
        assert "without a price" not in page


async def test_alerts_are_on_the_pages_of_their_tenant_and_of_operators(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    clock = admin.service.clock
    async with admin.service.database.write() as transaction:
        project = (await create_project(transaction, cats.id, "<b>archive</b>", clock)).id
        await add_price(transaction, NewPrice(PricedQuantity.TRAIN_TOKENS, "1000000", "USD"), clock)
    made = (await cats.http.post("/create_session", json={"project_id": project})).raise_for_status()
    session: str = made.json()["session_id"]
    dollars = BudgetName(Period.MONTH, currency="USD", project=project)
    for who, name, amount in ((cats, dollars, Decimal(100)), (dogs, BudgetName(Period.TOTAL), 1000)):
        async with admin.service.database.write() as transaction:
            await set_budget(transaction, who.id, name, amount, clock())
            spender = Spender(who.id, None, session if who is cats else "")
            await spend(transaction, [Spending(spender, BASE, clock(), {PricedQuantity.TRAIN_TOKENS: 850})], clock())
        clock.move(seconds=5)
    async with (
        operator(admin) as http,
        visitor(admin.service, cats.key) as mine,
        visitor(admin.service, dogs.key) as other,
    ):
        own, theirs = [(await one.get("/ui/usage")).text for one in (mine, other)]
        all_of = (await http.get("/ops/tenants")).text
        of_cats = (await http.get(f"/ops/tenants/{cats.id}")).text
    for page, of_tenant in ((own, "Month, project &lt;b&gt;archive&lt;/b&gt;"), (of_cats, "Month, project &lt;b&gt;")):
        assert [percent for percent, _ in _ALERT.findall(page)] == ["100", "80"]
        assert all("100 USD" in cells and of_tenant in cells for _, cells in _ALERT.findall(page))
    ((percent, cells),) = _ALERT.findall(theirs)
    assert (percent, "Total" in cells, "tokens" in cells, "USD" in cells) == ("80", True, True, False)
    told = [
        (percent, next(name for name in ("cats", "dogs") if f">{name}</a>" in cells))
        for percent, cells in _ALERT.findall(all_of)
    ]
    assert told == [("80", "dogs"), ("100", "cats"), ("80", "cats")]
