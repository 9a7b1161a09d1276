"""Names of the rates of keys and projects, in whose lines an operation stands beside its tenant's."""

from dataclasses import dataclass
from enum import StrEnum

from contracts.ids import TenantId


class RateScope(StrEnum):
    """Owner of a line within its tenant."""

    KEY = "key"
    PROJECT = "project"


@dataclass(frozen=True, slots=True, order=True)
class RateLine:
    """Line of one rate: of the tenant's key or project with the id ``scope_id``, for one meter.

    Lines are locked in this order.
    """

    tenant: TenantId
    scope: RateScope
    scope_id: str
    meter: str
