"""A runtime over a database, for tests of what works on one."""

from datetime import timedelta
from pathlib import Path

from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.publication import LocalPublication
from ledger.runtime import Runtime
from ledger.token_feed import TokenFeed
from ledger.wakeups import Wakeups
from store.clock import Clock
from store.data_folder import DataFolder
from store.database import Database
from store.settings import Settings
from telemetry.telemetry import Telemetry


def make_runtime(database: Database, folder: Path, clock: Clock, *, lease: timedelta | None = None) -> Runtime:
    """Return a runtime with wake-ups, telemetry and a data folder of its own; ``lease`` overrides the settings'."""
    settings = Settings(data_dir=folder) if lease is None else Settings(data_dir=folder, lease=lease)
    wakeups, telemetry = Wakeups(), Telemetry.of("test", clock)
    return Runtime(
        settings=settings,
        database=database,
        ledger=Ledger(database, wakeups, clock, telemetry, PayloadFiles(DataFolder(folder))),
        wakeups=wakeups,
        feed=TokenFeed(),
        publication=LocalPublication(),
        data_folder=DataFolder(folder),
        clock=clock,
        telemetry=telemetry,
    )


def lease_moves(runtime: Runtime, reason: str) -> int:
    """Return how many leases the runtime's metrics have counted for ``reason``."""
    counted = runtime.telemetry.metrics.registry.get_sample_value("weft_lease_moves_total", {"reason": reason})
    return int(counted or 0)
