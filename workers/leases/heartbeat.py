"""A worker process's heartbeat: it renews the process's lease, and tells whether the process may declare others dead."""

from datetime import datetime, timedelta
from time import monotonic

from ledger.runtime import Runtime
from workers.leases.processes import WorkerIdentity, renew

RENEWALS = 4
"""Renewals in the time of one lease: three may be late before the process counts as dead."""
ENDLESS_LEASE = timedelta(days=3650)
"""Lease of a process that is alone with its database: no other process watches it."""


class Heartbeat:
    """Heartbeat of this process; tells whether the process may declare others dead."""

    def __init__(self, identity: WorkerIdentity, runtime: Runtime) -> None:
        """Take the lease from the settings, or ``ENDLESS_LEASE`` where one process at a time has the database."""
        lease = runtime.settings.lease
        self.identity = identity
        # A process that is alone renews once: an idle service does not write.
        self.is_alone = runtime.database.has_one_service
        self.renewal_seconds = lease.total_seconds() / RENEWALS
        self._database = runtime.database
        self._clock = runtime.clock
        self._lease = ENDLESS_LEASE if self.is_alone else lease
        self._renewed = self._unbroken_since = float("-inf")
        self.is_ending = False
        self._has_told_end = False
        self.row_since: datetime | None = None
        """Time when this process's row was inserted. The row is another one after the process was taken for dead."""

    @property
    def is_due(self) -> bool:
        """True when the lease should be renewed."""
        if self.is_alone:
            return self._renewed == float("-inf")
        return self.is_ending != self._has_told_end or monotonic() - self._renewed >= self.renewal_seconds / 2

    @property
    def has_lease(self) -> bool:
        """True while the lease has not ended, so that other processes count this one as alive."""
        return monotonic() - self._renewed < self._lease.total_seconds()

    @property
    def held_since(self) -> float:
        """Monotonic time since which the lease has not lapsed; minus infinity before the first renewal."""
        return self._unbroken_since

    @property
    def is_sure(self) -> bool:
        """True while no other process can count this one as dead for at least the time of one renewal. True before the first."""
        return self._renewed == float("-inf") or monotonic() - self._renewed < (
            self._lease.total_seconds() - self.renewal_seconds
        )

    @property
    def may_declare_dead(self) -> bool:
        """True when this process may declare dead a process whose lease has ended.

        The process may once it has renewed without a break for the time of one lease, and while it is sure of its own. Else
        an outage of the database may have kept every process from renewing. Ask after the database's time was read: a
        database that halts between the two then makes no process look dead.
        """
        is_unbroken = monotonic() - self._unbroken_since >= self._lease.total_seconds()
        return self.has_lease and (self.is_alone or (self.is_sure and is_unbroken))

    def end(self) -> None:
        """Have the next renewal tell that this process ends in order and takes no more work. It is due at once."""
        self.is_ending = True

    async def renew(self) -> None:
        """Renew the lease. Raises ``Unavailable``."""
        # Taken before: the lease is written with an earlier time than that of the answer.
        now, is_ending = monotonic(), self.is_ending
        async with self._database.write() as transaction:
            row = await renew(transaction, self.identity, lease=self._lease, clock=self._clock, is_ending=is_ending)
        self.row_since, self._has_told_end = row, is_ending
        # Until the commit others saw the lease before. It counts as broken one renewal early: others renewed that much before.
        if monotonic() - self._renewed >= self._lease.total_seconds() - self.renewal_seconds:
            self._unbroken_since = now
        self._renewed = now
