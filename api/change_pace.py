"""Pace of tenants' changes: each has an entry in the audit log, so that nobody may make them without end."""

from collections.abc import Callable
from math import ceil
from time import monotonic

from contracts.errors import OverRate
from contracts.ids import TenantId

_HOUR = 3600.0
_METADATA = 1024
"""Bytes of metadata that count as a change: they stay for a month and longer."""


class ChangePace:
    """Changes of each tenant in one process: those of an hour at once, and then as many as an hour has (GCRA)."""

    def __init__(self, an_hour: int, clock: Callable[[], float] = monotonic) -> None:
        self._an_hour = an_hour
        self._clock = clock
        self._worked_off: dict[TenantId, float] = {}
        """Time at which all of a tenant's changes are worked off."""

    def count_metadata(self, tenant: TenantId, size: int) -> None:
        """Count ``size`` bytes of metadata that is stored; less than a KiB is free. Raises as ``count``."""
        self.count(tenant, size // _METADATA)

    def count(self, tenant: TenantId, changes: int = 1) -> None:
        """Count so many changes, at most an hour's. Raises ``OverRate`` if they are too many, and counts none of them."""
        now = self._clock()
        worked_off = max(self._worked_off.get(tenant, now), now) + _HOUR * min(1.0, changes / self._an_hour)
        early = worked_off - now - _HOUR
        if early > 0:
            raise OverRate(
                f"your keys have changed {self._an_hour} things within an hour, a KiB of metadata being one; send this request "
                f"again in {ceil(early)} s",
                seconds=ceil(early),
            )
        self._worked_off[tenant] = worked_off
