"""``weft doctor``: checks each part that a start needs, and says how to mend what is wrong."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy import create_engine as create_sync_engine
from sqlalchemy import select, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from cli.address import CannotListen, bind_address
from cli.base_models import read_base_models
from cli.data_folder_check import check_database_is_there, check_mark_and_disk
from cli.doctor_files import examine_recorded_files
from cli.doctor_services import examine_services
from cli.finding import Finding
from contracts.base_model import BaseModelFacts
from contracts.errors import WeftError
from engine.model.fingerprint import weights_fingerprint
from migrations.upgrade import current_is_head, is_newer, sync_url
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.private_folder import others_may_enter
from store.settings import Settings
from store.tables import BaseWeights

_LITTLE_BYTES = 2**30


def examine(settings: Settings) -> list[Finding]:
    """Check every part, change nothing, and return a finding for each."""
    database = _database(settings)
    findings = [Finding("settings", True, "valid"), _data_folder(settings, database), database, _port(settings)]
    if database.is_well and _has_database(settings):
        findings.append(examine_recorded_files(settings))
    if settings.redis_url is not None:
        findings += _cluster(settings, database)
    return [*findings, *examine_services(settings), *_base_models(settings)]


def _cluster(settings: Settings, database: Finding) -> list[Finding]:
    # Only here: a service of one process needs no Redis client.
    from cli.cluster_runtime import check_cluster
    from cli.doctor_cluster import examine_cluster

    try:
        check_cluster(settings)
    except WeftError as error:
        return [Finding("cluster", False, error.message)]
    return examine_cluster(settings, _names(settings), has_schema=database.is_well)


def _names(settings: Settings) -> list[str]:
    """Return the names of the served bases; none when one cannot be read, which ``_base_models`` reports."""
    try:
        return list(read_base_models(settings))
    except WeftError:
        return []


def _data_folder(settings: Settings, database: Finding) -> Finding:
    folder = settings.data_dir.absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Finding("data folder", False, f"{folder} cannot be written; choose another with --data")
    if (refused := _refusal(settings, database)) is not None:
        return Finding("data folder", False, f"{folder}: {refused}")
    if not folder.exists():
        return Finding("data folder", True, f"{folder} (made at the first start)")
    try:
        # A nameless file leaves nothing behind. Permission bits tell little about a network file system, or a full one.
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        return Finding("data folder", False, f"{folder}: {error.strerror}; make room, or choose another with --data")
    return _room_and_rights(folder)


def _refusal(settings: Settings, database: Finding) -> str | None:
    """Return why no process starts with this database on this folder, None where one does."""
    try:
        check_database_is_there(settings)
        if database.is_well and _has_database(settings):
            asyncio.run(_check_mark_and_disk(settings))
    except WeftError as error:
        return error.message
    except OSError as error:
        return f"{error.strerror}; make its files readable for this user"
    return None


def _has_database(settings: Settings) -> bool:
    """Return whether there is a database: SQLite's is made at the first start."""
    url = make_url(settings.resolved_database_url())
    return url.get_backend_name() != "sqlite" or Path(url.database or "").exists()


async def _check_mark_and_disk(settings: Settings) -> None:
    database = Database(create_engine(settings.resolved_database_url()))
    try:
        await check_mark_and_disk(database, DataFolder(settings.data_dir))
    finally:
        await database.close()


def _room_and_rights(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    if free < _LITTLE_BYTES:
        told = f"{folder}, {free / 2**30:.1f} GiB free: snapshots and checkpoints fail without room"
        return Finding("data folder", True, told, advises=True)
    if others_may_enter(folder):
        told = (
            f"{folder} is open to other users of this machine, and holds every tenant's weights; run `chmod 700` on it"
        )
        return Finding("data folder", True, told, advises=True)
    return Finding("data folder", True, f"{folder}, {free / 2**30:.0f} GiB free")


def _database(settings: Settings) -> Finding:
    url = settings.resolved_database_url()
    parsed = make_url(url)
    shown = parsed.render_as_string(hide_password=True)
    if not _has_database(settings):
        return Finding("database", True, f"{shown} (made at the first start)")
    try:
        asyncio.run(_connect(url))
        is_current, is_ahead = current_is_head(url), is_newer(url)
    except (SQLAlchemyError, OSError, WeftError) as error:
        return Finding("database", False, f"{shown}: {error}; check WEFT_DATABASE_URL and that the server runs")
    if is_ahead:
        return Finding("database", True, f"{shown}, its schema newer than this version's")
    if not is_current:
        return Finding("database", False, f"{shown}: the schema is not current; run `weft db upgrade`")
    return Finding("database", True, shown)


async def _connect(url: str) -> None:
    engine = create_engine(url)
    try:
        async with AsyncSession(engine) as session:
            await session.execute(text("SELECT 1"))
    finally:
        await engine.dispose()


def _port(settings: Settings) -> Finding:
    place = f"{settings.host}:{settings.port}"
    trouble = _trouble_of(settings, shared=False)
    if trouble is None:
        return Finding("address", True, f"{place} is free")
    # API processes of a cluster share their address: a running one is no obstacle.
    if settings.redis_url is not None and _trouble_of(settings, shared=True) is None:
        return Finding("address", True, f"{place} is in use, and can be shared with the APIs that listen there")
    return Finding("address", False, f"{place}: {trouble}; stop what listens there or pass --port")


def _trouble_of(settings: Settings, *, shared: bool) -> str | None:
    """Return why nothing can listen on the address, None where something can; ``shared``: beside others that share it."""
    try:
        bind_address(settings.host, settings.port, shared=shared, setting="--port").close()
    except CannotListen as error:
        return error.__cause__.strerror if isinstance(error.__cause__, OSError) else error.message
    return None


def _base_models(settings: Settings) -> list[Finding]:
    try:
        bases = read_base_models(settings)
    except WeftError as error:
        return [Finding("base model", False, error.message)]
    loaded = [_attempt(f"base model {name}", partial(_load, facts, settings)) for name, facts in bases.items()]
    return loaded + [finding for facts in bases.values() for finding in _weights(facts, settings)]


def _attempt(part: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(part, True, look())
    except WeftError as error:
        return Finding(part, False, error.message)


def _weights(facts: BaseModelFacts, settings: Settings) -> list[Finding]:
    """Compare the base's weights with those that its name stands for; no finding before their first use."""
    if not _has_database(settings):
        return []
    engine = create_sync_engine(sync_url(settings.resolved_database_url()))
    try:
        with engine.connect() as connection:
            query = select(BaseWeights.fingerprint).where(BaseWeights.base_model == facts.name)
            accepted = connection.scalar(query)
        own = weights_fingerprint(facts.path, dtype=settings.base_dtype)
    except (SQLAlchemyError, WeftError):
        # No database, an old schema, or no files: another finding says so.
        return []
    finally:
        engine.dispose()
    part = f"weights of {facts.name}"
    if accepted is None:
        return []
    if accepted == own:
        return [Finding(part, True, f"{own[:12]}, as its runs were trained on")]
    told = (
        f"{own[:12]} in {facts.path}, its runs were trained on {accepted[:12]}: give the folder those, or, if the change is "
        f"meant, run `weft base accept {facts.name}`"
    )
    return [Finding(part, False, told)]


def _load(facts: BaseModelFacts, settings: Settings) -> str:
    """Load the base as the service would: the surest check of its files and projections."""
    from engine.model.base import BaseModel

    base = BaseModel.load(facts, dtype=settings.base_dtype, device=settings.device)
    return (
        f"{facts.architecture}, {len(base.projections)} projections, context {facts.context_length}, "
        f"vocabulary {facts.vocabulary_size}"
    )
