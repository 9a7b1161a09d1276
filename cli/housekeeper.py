"""Housekeeping behind the admin API: the workers' steps, run in a service's process or by a command."""

import asyncio
from collections.abc import Mapping

from api.admin.services import StepStanding
from contracts.errors import InvalidRequest, WeftError
from ledger.runtime import Runtime
from store.database import Database
from store.settings import Settings
from workers.housekeeping.housekeeping import Housekeeping
from workers.housekeeping.records import StepRecord, read_records
from workers.housekeeping.schedule import StepName


class ServiceHousekeeper:
    """Housekeeping by a process of the service, which has the service's files."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def status(self) -> list[StepStanding]:
        """Return every step's last run."""
        return await _status(self._runtime.database)

    async def run(self, step: str | None) -> list[StepStanding]:
        """Run a step, or all, until nothing is left. Raises ``InvalidRequest`` for an unknown one."""
        # A command declares nobody dead: it is not in touch with the database all the while.
        return _told(await Housekeeping(self._runtime, lambda: False).sweep(_named(step), until_done=True))


class CommandHousekeeper:
    """Housekeeping by a command: of a cluster only, since `weft serve` has its files alone."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database

    async def status(self) -> list[StepStanding]:
        """Return every step's last run."""
        return await _status(self._database)

    async def run(self, step: str | None) -> list[StepStanding]:
        """Run a step, or all, until nothing is left. Raises ``InvalidRequest`` for an unknown one, and beside `weft serve`."""
        steps, url = _named(step), self._settings.database_url
        if url is None or not url.startswith("postgresql"):
            raise InvalidRequest(
                "`weft serve` keeps house by itself, every WEFT_HOUSEKEEPING_INTERVAL; call its admin API (--url) to do so now"
            )
        # Imported late, so that other commands stay quick.
        from cli.cluster_runtime import WORKER, open_cluster

        async with open_cluster(self._settings, WORKER, [], listens=False) as cluster:
            return _told(await Housekeeping(cluster.runtime, lambda: False).sweep(steps, until_done=True))


async def _status(database: Database) -> list[StepStanding]:
    async with database.read() as session:
        records = await read_records(session)
    return [_standing(step, record) for step, record in records.items()]


def _named(step: str | None) -> list[StepName]:
    if step is None:
        return list(StepName)
    if step not in [*StepName]:
        raise InvalidRequest(f"no step of housekeeping is named {step[:40]!r}; the steps are {', '.join(StepName)}")
    return [StepName(step)]


def _told(outcomes: Mapping[StepName, StepRecord | BaseException]) -> list[StepStanding]:
    return [_outcome(step, outcome) for step, outcome in outcomes.items()]


def _outcome(step: StepName, outcome: StepRecord | BaseException) -> StepStanding:
    if isinstance(outcome, asyncio.CancelledError):
        raise outcome
    if isinstance(outcome, BaseException):
        why = outcome.message if isinstance(outcome, WeftError) else type(outcome).__name__
        return StepStanding(step, has_run=True, error=why)
    return _standing(step, outcome)


def _standing(step: StepName, record: StepRecord | None) -> StepStanding:
    if record is None:
        return StepStanding(step)
    return StepStanding(
        step,
        succeeded_at=record.succeeded_at,
        rows=record.handled,
        seconds=record.seconds,
        behind_since=record.behind_since,
        failing_since=record.failing_since,
        has_run=True,
    )
