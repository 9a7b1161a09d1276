"""The readiness checks that every process has: its database, its schema and its base models."""

from collections.abc import Collection
from functools import partial

from migrations.upgrade import revisions
from store.database import Database
from store.database_health import TakesNoWrites, check_health
from telemetry.readiness import NotReady, Readiness

_PROBE_SECONDS = 1.0


def readiness(database: Database, bases: Collection[str]) -> Readiness:
    """Return the checks of database, schema and bases; each process adds checks of its own."""
    script = revisions()
    older = frozenset(one.revision for one in script.walk_revisions()) - set(script.get_heads())
    found = Readiness()
    found.add("database", partial(_database, database, older))
    found.add("bases", partial(_bases, bases))
    return found


async def _database(database: Database, older: frozenset[str]) -> None:
    """Raise ``NotReady`` unless the database takes writes and its schema is current or newer: newer schemas only add."""
    try:
        revision = await check_health(database, seconds=_PROBE_SECONDS)
    except TakesNoWrites as reason:
        raise NotReady(str(reason)) from reason
    if revision is None or revision in older:
        raise NotReady("the schema is out of date; run `weft db upgrade`")


async def _bases(bases: Collection[str]) -> None:
    if not bases:
        raise NotReady("no base model is served")
