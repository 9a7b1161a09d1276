"""``weft doctor``: looks at each part a start needs and says how to mend it."""

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from clients.command.base_models import read_base_models
from engine.contracts.base_model import BaseModelFacts
from engine.contracts.errors import WeftError
from migrations.upgrade import current_is_head
from tenants.database import create_engine
from tenants.settings import Settings


@dataclass(frozen=True, slots=True)
class Finding:
    """How one part is, and what to do when it is not well."""

    part: str
    is_well: bool
    text: str


def examine(settings: Settings) -> list[Finding]:
    """Look at every part; nothing is changed."""
    findings = [Finding("settings", True, "valid"), _data_folder(settings), _database(settings), _port(settings)]
    return findings + _base_models(settings)


def _data_folder(settings: Settings) -> Finding:
    folder = settings.data_dir.absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Finding("data folder", False, f"{folder} cannot be written; choose another with --data")
    return Finding("data folder", True, str(folder) if folder.exists() else f"{folder} (made at the first start)")


def _database(settings: Settings) -> Finding:
    url = settings.resolved_database_url()
    parsed = make_url(url)
    shown = parsed.render_as_string(hide_password=True)
    if parsed.get_backend_name() == "sqlite" and parsed.database and not os.path.exists(parsed.database):
        return Finding("database", True, f"{shown} (made at the first start)")
    try:
        asyncio.run(_connect(url))
        is_current = current_is_head(url)
    except (SQLAlchemyError, OSError) as error:
        return Finding("database", False, f"{shown}: {error}; check WEFT_DATABASE_URL and that the server runs")
    if not is_current:
        return Finding("database", False, f"{shown}: the schema is not current; run `weft db upgrade`")
    return Finding("database", True, shown)


async def _connect(url: str) -> None:
    engine = create_engine(url)
    try:
        async with engine.connect() as connection:
            await connection.execute(text("SELECT 1"))
    finally:
        await engine.dispose()


def _port(settings: Settings) -> Finding:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            reason = f"{settings.host}:{settings.port}: {error.strerror}; stop what listens there or pass --port"
            return Finding("address", False, reason)
    return Finding("address", True, f"{settings.host}:{settings.port} is free")


def _base_models(settings: Settings) -> list[Finding]:
    try:
        bases = read_base_models(settings)
    except WeftError as error:
        return [Finding("base model", False, error.message)]
    return [_attempt(f"base model {name}", partial(_load, facts, settings)) for name, facts in bases.items()]


def _attempt(part: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(part, True, look())
    except WeftError as error:
        return Finding(part, False, error.message)


def _load(facts: BaseModelFacts, settings: Settings) -> str:
    """Load the base as the service would: the surest check of its files and projections."""
    from engine.training.base import BaseModel

    base = BaseModel.load(facts, dtype=settings.base_dtype, device=settings.device)
    return (
        f"{facts.architecture}, {len(base.projections)} projections, context {facts.context_length}, "
        f"vocabulary {facts.vocabulary_size}"
    )
