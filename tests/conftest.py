"""Fixtures for every test: the tiny base, and the rule for services that are not there."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from engine.model.tiny_model import write_tiny_model
from migrations.upgrade import upgrade
from testing.throwaway_database import DEFAULT_SERVER, throwaway_database

ROOT = Path(__file__).resolve().parent.parent


SHARED = {ROOT / "tests" / "engine" / "sampling" / "vllm": "vllm", ROOT / "tests" / "cluster": "cluster"}
"""Folders whose tests share a vLLM server or a cluster. Two clusters would need more connections than PostgreSQL has."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one worker of pytest-xdist, and those of a folder in ``SHARED``, too."""
    for item in items:
        shared = (group for folder, group in SHARED.items() if item.path.is_relative_to(folder))
        item.add_marker(pytest.mark.xdist_group(next(shared, str(item.path))))


def missing_service(name: str, reason: str) -> None:
    """Skip on a developer's machine; fail in CI, where every service must be there."""
    text = f"{name} cannot be reached: {reason}"
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base model's folder."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty SQLite file with the newest schema, to be copied."""
    path = tmp_path_factory.mktemp("migrated") / "weft.db"
    upgrade(f"sqlite+aiosqlite:///{path}")
    return path


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """The async URL of an empty throw-away database."""
    try:
        psycopg.connect(DEFAULT_SERVER, connect_timeout=5).close()
    except psycopg.OperationalError as error:
        missing_service("PostgreSQL", str(error))
        raise
    with throwaway_database() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh database of each kind, its schema the newest."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_database"), tmp_path / "weft.db")
        yield f"sqlite+aiosqlite:///{tmp_path}/weft.db"
        return
    url: str = request.getfixturevalue("postgres_url")
    upgrade(url)
    yield url
