"""Weights of tenants where work is shared out: a tenant's share times its class's factor."""

from typing import Any

from sqlalchemy import ColumnElement, Float, case, cast, literal

from contracts.service_class import FACTORS, ServiceClass


def weight(tenant: Any) -> ColumnElement[float]:
    """Return the weight as a column named ``share``; ``tenant`` has the columns of ``tenants``."""
    factors = [
        (tenant.service_class == service_class.value, literal(factor, Float))
        for service_class, factor in FACTORS.items()
        if service_class is not ServiceClass.STANDARD
    ]
    # A class that only a newer version knows counts as standard.
    standard = literal(FACTORS[ServiceClass.STANDARD], Float)
    return cast(tenant.share * case(*factors, else_=standard), Float).label("share")
