"""What the parts of a process share: composed once, by whoever starts the process."""

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
    """Settings, database, ledger, and the ways to other parts of the service, wherever they run."""

    settings: Settings
    database: Database
    ledger: Ledger
    wakeups: Wakeups
    feed: TokenFeed
    publication: Publication
    data_folder: DataFolder
    clock: Clock
    telemetry: Telemetry
