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
from tenants.prices import HOURS_OF_A_MONTH, Meter, told
from tenants.usage_exports import UsageRecord

_PROVIDER: Final = "weft"
_CURRENCY: Final = "USD"
"""Currency told where nothing has a price."""


class Document(StrEnum):
    """Form of an export of usage."""

    FOCUS = "focus"
    CLOUDEVENTS = "cloudevents"


MEDIA_TYPES: Final[Mapping[Document, str]] = {
    Document.FOCUS: "text/csv",
    Document.CLOUDEVENTS: "application/x-ndjson",
}


def _month(record: UsageRecord) -> datetime:
    return record.start.replace(day=1, hour=0)


def _next_month(record: UsageRecord) -> datetime:
    year, month = divmod(record.start.year * 12 + record.start.month, 12)
    return record.start.replace(year=year, month=month + 1, day=1, hour=0)


def _cost(record: UsageRecord) -> Decimal:
    # FOCUS has no unknown cost: what has no price is charged nothing.
    return Decimal(told(record.cost) or 0)


def _quantity(record: UsageRecord) -> Decimal:
    """Return the quantity in the unit that has the price."""
    unit = 10**9 * HOURS_OF_A_MONTH if record.meter is Meter.STORAGE else 10**6
    return Decimal(told(Decimal(record.quantity) / unit) or 0)


def _unit(record: UsageRecord) -> str:
    return "GB-Months" if record.meter is Meter.STORAGE else "1000000 Tokens"


def _consumed(record: UsageRecord) -> Decimal:
    return Decimal(record.quantity) / 10**9 if record.meter is Meter.STORAGE else Decimal(record.quantity)


def _described(record: UsageRecord) -> str:
    of = "" if record.base_model is None else f" of {record.base_model}"
    return f"{record.meter}{of}" + ("" if record.rate is not None else " (no price)")


def _sku(record: UsageRecord) -> str:
    return f"{record.meter}:{record.base_model or ''}"


def _sku_price(record: UsageRecord) -> str | None:
    return None if record.rate is None else f"{_sku(record)}:{told(record.rate)}"


_COLUMNS: Final[Mapping[str, Callable[[UsageRecord], Cell]]] = {
    "BilledCost": _cost,
    "BillingAccountId": lambda record: record.tenant,
    "BillingAccountName": lambda record: record.tenant,
    "BillingAccountType": lambda _: "Tenant",
    "BillingCurrency": lambda _: _CURRENCY,
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
    "ConsumedUnit": lambda record: "GB-Hours" if record.meter is Meter.STORAGE else "Tokens",
    "ContractedCost": _cost,
    "ContractedUnitPrice": lambda record: record.rate,
    "EffectiveCost": _cost,
    "InvoiceIssuerName": lambda _: _PROVIDER,
    "ListCost": _cost,
    "ListUnitPrice": lambda record: record.rate,
    "PricingCategory": lambda _: "Standard",
    "PricingCurrency": lambda _: _CURRENCY,
    "PricingQuantity": _quantity,
    "PricingUnit": _unit,
    "ProviderName": lambda _: _PROVIDER,
    "PublisherName": lambda _: _PROVIDER,
    "RegionId": lambda _: None,
    "RegionName": lambda _: None,
    "ResourceId": lambda record: record.run or record.session,
    "ResourceName": lambda record: record.run or record.session,
    "ResourceType": lambda record: "Run" if record.run else "Session" if record.session else None,
    "ServiceCategory": lambda _: "AI and Machine Learning",
    "ServiceName": lambda _: _PROVIDER,
    "ServiceSubcategory": lambda _: "Generative AI",
    "SkuId": _sku,
    "SkuMeter": lambda record: record.meter.value,
    "SkuPriceId": _sku_price,
    "SubAccountId": lambda record: record.project,
    "SubAccountName": lambda record: record.project,
    "SubAccountType": lambda _: "Project",
    "Tags": lambda _: "{}",
    "x_Key": lambda record: record.key,
    "x_Kind": lambda record: record.kind,
    "x_RecordId": lambda record: record.id,
}
_OF_CURRENCY: Final = ("BillingCurrency", "PricingCurrency")


def header(document: Document) -> str:
    """Return the beginning of the document."""
    return _csv([list(_COLUMNS)]) if document is Document.FOCUS else ""


def lines(document: Document, records: Sequence[UsageRecord], currency: str | None) -> str:
    """Return the records as lines of the document."""
    if document is Document.CLOUDEVENTS:
        return "".join(f"{json.dumps(cloud_event(record, currency))}\n" for record in records)
    told_currency = currency or _CURRENCY
    return _csv(
        [
            [told_currency if name in _OF_CURRENCY else cell(make(record)) for name, make in _COLUMNS.items()]
            for record in records
        ]
    )


def cloud_event(record: UsageRecord, currency: str | None) -> dict[str, object]:
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
            "rate": told(record.rate),
            "cost": told(record.cost),
            "currency": None if record.cost is None else currency,
        },
    }


def _time(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _csv(rows: Sequence[Sequence[Cell]]) -> str:
    out = io.StringIO()
    # Lines end as RFC 4180 has them: with another end the writer would not quote a \r, which then ends a line within a cell.
    csv.writer(out).writerows(rows)
    return out.getvalue()
