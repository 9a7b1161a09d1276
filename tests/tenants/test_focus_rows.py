"""Rows of a FOCUS 1.2 export keep the rules of each column: of charges with a price, a tenant's own price, and none.

The rules: https://github.com/FinOps-Open-Cost-and-Usage-Spec/FOCUS_Spec/tree/v1.2/specification/columns.
"""

import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal, localcontext

from store.clock import utc_now
from tenants.prices import PricedQuantity
from tenants.projects import assign_project, create_project
from tenants.usage_documents import Document, header
from tests.tenants.test_prices import exported, price, rows_of
from tests.tenants.usage_books import NOON, Books

Row = dict[str, str]
LATER = NOON + timedelta(hours=3)
HOUR = timedelta(hours=1)
MAY_BE_EMPTY = re.compile(
    "ChargeClass|CommitmentDiscount.*|InvoiceId|Region(Id|Name)|Resource(Id|Name|Type)|SkuPriceDetails|SubAccount.*|x_.*"
)
"""Columns that a row of usage may leave empty."""
TIMES = ("BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd")
TOGETHER = (
    ("SubAccountId", "SubAccountName", "SubAccountType"),
    ("ResourceId", "ResourceType"),
    ("CommitmentDiscountId", "CommitmentDiscountStatus"),
)
"""Columns that are empty together, or not at all."""


def numbers(row: Row) -> Iterator[tuple[str, str]]:
    """Yield the columns of numbers."""
    return ((name, value) for name, value in row.items() if re.search("(Cost|Quantity|UnitPrice)$", name))


def matches(row: Row, cost: str, rate: str) -> bool:
    """Return whether the cost is the price times the quantity: of storage to the 16 places that both have."""
    with localcontext(prec=60):
        product = Decimal(row[rate]) * Decimal(row["PricingQuantity"])
        return abs(product - Decimal(row[cost])) < Decimal("1e-14")


RULES: dict[str, Callable[[Row], bool]] = {
    "no row of usage leaves another column empty": lambda row: all(
        value.strip() or MAY_BE_EMPTY.fullmatch(name) for name, value in row.items()
    ),
    "times are of UTC, in ISO 8601": lambda row: all(
        re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row[name]) for name in TIMES
    ),
    "a billing period is a month": lambda row: (
        (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == ("2030-01-01T00:00:00Z", "2030-02-01T00:00:00Z")
    ),
    "numbers have no sign and no exponent": lambda row: all(
        re.fullmatch(r"\d+(\.\d+)?", value) for name, value in numbers(row)
    ),
    "a category is of those allowed": lambda row: (
        (row["ChargeCategory"], row["ChargeFrequency"], row["PricingCategory"]) == ("Usage", "Usage-Based", "Standard")
    ),
    "nothing corrects what was invoiced, and there is no invoice": lambda row: (
        not row["ChargeClass"] and not row["InvoiceId"]
    ),
    "the cost by the contract is its price times the quantity": lambda row: matches(
        row, "ContractedCost", "ContractedUnitPrice"
    ),
    "the cost by the list is its price times the quantity": lambda row: matches(row, "ListCost", "ListUnitPrice"),
    "what is billed is the cost by the contract": lambda row: (
        row["BilledCost"] == row["EffectiveCost"] == row["ContractedCost"] == row["PricingCurrencyEffectiveCost"]
    ),
    "units are of the form of FOCUS": lambda row: (
        {row["PricingUnit"], row["ConsumedUnit"]} in ({"GB-Months", "GB-Hours"}, {"1000000 Tokens", "Tokens"})
    ),
    "columns of one thing are empty together": lambda row: all(
        len({bool(row[name]) for name in names}) == 1 for names in TOGETHER
    ),
    "a name is not the id again": lambda row: (
        not row["ResourceName"]
        and row["BillingAccountName"] != row["BillingAccountId"]
        and row["SubAccountName"] != row["SubAccountId"]
    ),
    "keys and values are JSON, of keys of weft's own": lambda row: (
        all(key.startswith("x_") for key in json.loads(row["SkuPriceDetails"] or "{}"))
        and json.loads(row["Tags"]) == {}
    ),
}


async def rows(books: Books) -> list[Row]:
    """Return the rows of both tenants. Cats has a project, prices of its own, and none for what it drew. Dogs pays the list's."""
    cats, _ = books.tenants
    for meter, amount, tenant in (
        (PricedQuantity.TRAIN_TOKENS, "3", None),
        (PricedQuantity.STORAGE, "0.31", None),
        (PricedQuantity.TRAIN_TOKENS, "1.2345678901", cats),
    ):
        await price(books, meter, amount, tenant=tenant)
    await price(books, PricedQuantity.TRAIN_TOKENS, "7", since=NOON + HOUR, now=NOON, tenant=cats)
    async with books.database.write() as transaction:
        project = await create_project(transaction, cats, "paper", utc_now)
        await assign_project(transaction, cats, books.sessions[0], project.id)
    for at in (NOON, NOON + HOUR):
        await books.ended(0, at, tokens=1_234_567)
        await books.ended(1, at, tokens=11)
        await books.sampled(0, at)
    await books.stored(1, 123_456_789)
    for at in (NOON + HOUR, LATER):
        await books.metered(at)
    return [row for who in (0, 1) for row in rows_of(await exported(books, who, LATER))]


async def test_every_row_keeps_the_rules_of_its_columns(books: Books) -> None:
    found = await rows(books)
    assert {row["SkuMeter"] for row in found} == {"train_tokens", "prompt_tokens", "cached_prompt_tokens"} | {
        "sampled_tokens",
        "storage",
    }
    broken = [(rule, row) for rule, holds in RULES.items() for row in found if not holds(row)]
    assert not broken, broken[0]


async def test_a_tenants_own_price_is_told_beside_the_lists(books: Books) -> None:
    trained = [row for row in await rows(books) if row["SkuMeter"] == "train_tokens"]
    told = {(row["ListUnitPrice"], row["ContractedUnitPrice"], row["ListCost"]) for row in trained}
    assert told == {
        ("3", "1.2345678901", "3.703701"),
        ("3", "7", "3.703701"),
        ("3", "3", "0.000033"),
    }


async def test_the_price_of_a_sku_has_one_id_over_time_and_tenants(books: Books) -> None:
    found = await rows(books)
    ids = {(row["SkuMeter"], row["SkuId"], row["SkuPriceId"]) for row in found}
    assert len(ids) == len({row["SkuMeter"] for row in found})


async def test_own_columns_come_after_those_of_focus() -> None:
    names = header(Document.FOCUS).strip().split(",")
    assert names == sorted(names, key=lambda name: (name.startswith("x_"), name))
