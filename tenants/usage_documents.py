"""Documents of usage for other systems: FOCUS 1.2 rows as CSV, and CloudEvents 1.0 as JSON lines.

FOCUS: https://focus.finops.org/focus-specification/v1-2/. CloudEvents: https://github.com/cloudevents/spec.
"""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Final

from contracts.csv_cells import Cell, cell
from tenants.prices import HOURS_OF_A_MONTH, PricedQuantity, cost_at, cost_text
from tenants.usage_exports import UsageRecord

_PROVIDER: Final = "weft"
_CURRENCY: Final = "USD"
"""Currency told of an hour in which nothing had a price."""


class Document(StrEnum):
    """Form of an export of usage."""

    FOCUS = "focus"
    CLOUDEVENTS = "cloudevents"


FINAL_BEFORE = "weft-final-before"
"""Header of an export: hours from this time on may still change and are left out."""
MEDIA_TYPES: Final[Mapping[Document, str]] = {
    Document.FOCUS: "text/csv",
    Document.CLOUDEVENTS: "application/x-ndjson",
}


def _month(record: UsageRecord) -> datetime:
    return record.start.replace(day=1, hour=0)


def _next_month(record: UsageRecord) -> datetime:
    year, month = divmod(record.start.year * 12 + record.start.month, 12)
    return record.start.replace(year=year, month=month + 1, day=1, hour=0)


def _currency(record: UsageRecord) -> str:
    return record.currency or _CURRENCY


def _cost(record: UsageRecord) -> Decimal:
    # FOCUS has no unknown cost: what has no price is charged nothing.
    return Decimal(cost_text(record.cost) or 0)


def _list_cost(record: UsageRecord) -> Decimal:
    return Decimal(cost_text(cost_at(_list_rate(record), record.meter, record.quantity)) or 0)


def _rate(record: UsageRecord) -> Decimal:
    return Decimal(cost_text(record.rate) or 0)


def _list_rate(record: UsageRecord) -> Decimal:
    return Decimal(cost_text(record.list_rate) or 0)


def _quantity(record: UsageRecord) -> Decimal:
    """Return the quantity in the unit that has the price."""
    unit = 10**9 * HOURS_OF_A_MONTH if record.meter is PricedQuantity.STORAGE else 10**6
    return Decimal(cost_text(Decimal(record.quantity) / unit) or 0)


def _unit(record: UsageRecord) -> str:
    return "GB-Months" if record.meter is PricedQuantity.STORAGE else "1000000 Tokens"


def _consumed(record: UsageRecord) -> Decimal:
    return Decimal(record.quantity) / 10**9 if record.meter is PricedQuantity.STORAGE else Decimal(record.quantity)


def _described(record: UsageRecord) -> str:
    of = "" if record.base_model is None else f" of {record.base_model}"
    return f"{record.meter}{of}" + ("" if record.rate is not None else " (no price)")


def _sku(record: UsageRecord) -> str:
    return f"{record.meter}:{record.base_model or ''}"


def _sku_details(record: UsageRecord) -> str | None:
    return None if record.base_model is None else json.dumps({"x_BaseModel": record.base_model})


_COLUMNS: Final[Mapping[str, Callable[[UsageRecord], Cell]]] = {
    "BilledCost": _cost,
    "BillingAccountId": lambda record: record.tenant,
    "BillingAccountName": lambda record: record.tenant_name,
    "BillingAccountType": lambda _: "Tenant",
    "BillingCurrency": _currency,
    "BillingPeriodEnd": _next_month,
    "BillingPeriodStart": _month,
    "ChargeCategory": lambda _: "Usage",
    "ChargeClass": lambda _: None,
    "ChargeDescription": _described,
    "ChargeFrequency": lambda _: "Usage-Based",
    "ChargePeriodEnd": lambda record: record.end,
    "ChargePeriodStart": lambda record: record.start,
    "CommitmentDiscountCategory": lambda _: None,
    "CommitmentDiscountId": lambda _: None,
    "CommitmentDiscountName": lambda _: None,
    "CommitmentDiscountStatus": lambda _: None,
    "CommitmentDiscountType": lambda _: None,
    "ConsumedQuantity": _consumed,
    "ConsumedUnit": lambda record: "GB-Hours" if record.meter is PricedQuantity.STORAGE else "Tokens",
    "ContractedCost": _cost,
    "ContractedUnitPrice": _rate,
    "EffectiveCost": _cost,
    "InvoiceId": lambda _: None,
    "InvoiceIssuerName": lambda _: _PROVIDER,
    "ListCost": _list_cost,
    "ListUnitPrice": _list_rate,
    "PricingCategory": lambda _: "Standard",
    # All prices are in the currency of the bill.
    "PricingCurrency": _currency,
    "PricingCurrencyContractedUnitPrice": _rate,
    "PricingCurrencyEffectiveCost": _cost,
    "PricingCurrencyListUnitPrice": _list_rate,
    "PricingQuantity": _quantity,
    "PricingUnit": _unit,
    "ProviderName": lambda _: _PROVIDER,
    "PublisherName": lambda _: _PROVIDER,
    "RegionId": lambda _: None,
    "RegionName": lambda _: None,
    "ResourceId": lambda record: record.run or record.session,
    # Runs and sessions have ids alone, which a name may not repeat.
    "ResourceName": lambda _: None,
    "ResourceType": lambda record: "Run" if record.run else "Session" if record.session else None,
    "ServiceCategory": lambda _: "AI and Machine Learning",
    "ServiceName": lambda _: _PROVIDER,
    "ServiceSubcategory": lambda _: "Generative AI",
    "SkuId": _sku,
    "SkuMeter": lambda record: record.meter.value,
    "SkuPriceDetails": _sku_details,
    # The same in every hour and for every tenant, whatever the amount.
    "SkuPriceId": _sku,
    "SubAccountId": lambda record: record.project,
    "SubAccountName": lambda record: record.project_name,
    "SubAccountType": lambda _: "Project",
    "Tags": lambda _: "{}",
    "x_Key": lambda record: record.key,
    "x_Kind": lambda record: record.kind,
    "x_RecordId": lambda record: record.id,
}


def header(document: Document) -> str:
    """Return the beginning of the document."""
    return _csv([list(_COLUMNS)]) if document is Document.FOCUS else ""


def lines(document: Document, records: Sequence[UsageRecord]) -> str:
    """Return the records as lines of the document."""
    if document is Document.CLOUDEVENTS:
        return "".join(f"{json.dumps(cloud_event(record))}\n" for record in records)
    return _csv([[cell(make(record)) for make in _COLUMNS.values()] for record in records])


def cloud_event(record: UsageRecord) -> dict[str, object]:
    """Return the record as an event. A receiver knows a repeated one by ``source`` and ``id``."""
    return {
        "specversion": "1.0",
        "id": record.id,
        "source": _PROVIDER,
        "type": f"weft.usage.{record.meter}",
        "subject": record.tenant,
        "time": _time(record.end),
        "datacontenttype": "application/json",
        "data": {
            "start": _time(record.start),
            "end": _time(record.end),
            "project": record.project,
            "session": record.session,
            "run": record.run,
            "key": record.key,
            "base_model": record.base_model,
            "kind": record.kind,
            "meter": record.meter,
            "quantity": record.quantity,
            "rate": cost_text(record.rate),
            "cost": cost_text(record.cost),
            "currency": None if record.cost is None else record.currency,
        },
    }


def _time(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _csv(rows: Sequence[Sequence[Cell]]) -> str:
    out = io.StringIO()
    # Lines end as RFC 4180 has them: with another end the writer would not quote a \r, which then ends a line within a cell.
    csv.writer(out).writerows(rows)
    return out.getvalue()
