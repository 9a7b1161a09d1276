"""The runtime: what the parts of one process share, composed once at its start."""

from dataclasses import dataclass

from ledger.ledger import Ledger
from ledger.publication import Publication
from ledger.token_feed import TokenFeed
from ledger.wakeups import Wakeups
from store.clock import Clock
from store.data_folder import DataFolder
from store.database import Database
from store.settings import Settings
from telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Runtime:
    """Settings, database and ledger of a process, and its ways to the other parts of the service.

    ``wakeups``, ``feed`` and ``publication`` reach parts in this process or, in a cluster, in others.
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
