"""The parts that every process of the service opens: database, ledger, clock, files, and links to other processes."""

from dataclasses import dataclass, field

from ledger.ledger import Ledger
from ledger.publication import Publication
from ledger.token_feed import TokenFeed
from ledger.wakeups import Wakeups
from store.clock import Clock
from store.data_folder import DataFolder
from store.database import Database
from store.settings import Settings
from telemetry.telemetry import Telemetry
from tenants.request_rates import RequestRates


@dataclass(frozen=True, slots=True)
class Runtime:
    """Record of a process's shared parts, composed once by the command that starts the process.

    ``wakeups``, ``feed`` and ``publication`` reach the other parts of the service, in this process or in others.
    """

    settings: Settings
    database: Database
    ledger: Ledger
    wakeups: Wakeups
    feed: TokenFeed
    publication: Publication
    data_folder: DataFolder
    clock: Clock
    telemetry: Telemetry
    request_rates: RequestRates = field(default_factory=RequestRates)
