"""What a process must find to be able to work: the checks that every process has."""

from collections.abc import Collection
from functools import partial

from alembic.script import ScriptDirectory

from migrations.upgrade import alembic_config
from store.database import Database
from store.database_health import TakesNoWrites, check_health
from store.settings import Settings
from telemetry.readiness import NotReady, Readiness

_PROBE_SECONDS = 1.0


def readiness(settings: Settings, database: Database, bases: Collection[str]) -> Readiness:
    """Database, schema and bases; the composer adds what else its process needs."""
    script = ScriptDirectory.from_config(alembic_config(settings.resolved_database_url()))
    older = frozenset(one.revision for one in script.walk_revisions()) - set(script.get_heads())
    found = Readiness()
    found.add("database", partial(_database, database, older))
    found.add("bases", partial(_bases, bases))
    return found


async def _database(database: Database, older: frozenset[str]) -> None:
    """It answers and takes writes, and its schema is this code's or a newer one: those only add."""
    try:
        revision = await check_health(database, seconds=_PROBE_SECONDS)
    except TakesNoWrites as reason:
        raise NotReady(str(reason)) from reason
    if revision is None or revision in older:
        raise NotReady("the schema is out of date; run `weft db upgrade`")


async def _bases(bases: Collection[str]) -> None:
    if not bases:
        raise NotReady("no base model is served")
