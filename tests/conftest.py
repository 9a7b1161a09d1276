"""Fixtures for every test: the tiny base, and the rule for services that are not there."""

import functools
import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import hypothesis
import psycopg
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from engine.model.tiny_model import write_tiny_model
from migrations.upgrade import upgrade
from testing.emptied_databases import EmptiedDatabases
from testing.throwaway_database import DEFAULT_SERVER, throwaway_database

ROOT = Path(__file__).resolve().parent.parent
# An example may take long where other tests compute beside it.
hypothesis.settings.register_profile("shared-cores", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("shared-cores")


SHARED = {
    "cluster": ["tests/cluster/"],
    "exact": ["tests/e2e/test_limits.py", "tests/e2e/test_paced.py", "tests/e2e/test_tenancy.py"],
    "ui": ["tests/ui/"],
    "vllm": ["tests/engine/sampling/vllm/"],
    "vllm_service": [
        "tests/e2e/test_cleared_caches.py",
        "tests/e2e/test_gates_over_http.py",
        "tests/e2e/test_openai",
        "tests/e2e/test_sampling_extras.py",
        "tests/e2e/test_sdk_on_vllm.py",
        "tests/e2e/test_sharing.py",
        "tests/e2e/test_staleness_over_http.py",
    ],
}
"""Beginnings of the paths of tests that share a server or a cluster. PostgreSQL has connections for one cluster only."""
WAITING = "exact"
"""Tests that share a service and mostly wait for its limits."""
MOST_COMPUTING = 2
"""Shared servers that compute beside one another. More take turns on two cores, and each test takes as much longer."""


def shared_by(nodeid: str) -> str | None:
    """Return what the test shares with tests of other files, None if it shares nothing."""
    return next((name for name, beginnings in SHARED.items() if nodeid.startswith(tuple(beginnings))), None)


class FilesTogether(LoadScopeScheduling):
    """Scheduler of pytest-xdist: one worker runs all tests of a file, and all that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        return shared_by(nodeid) or nodeid.split("::", 1)[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give a worker the next tests: none of a further shared server while enough of them compute."""
        computing = [
            scope
            for units in self.assigned_work.values()
            for scope, tests in units.items()
            if _computes(scope) and not all(tests.values())
        ]
        if len(computing) >= MOST_COMPUTING:
            light = next((scope for scope in self.workqueue if not _computes(scope)), None)
            if light is not None:
                self.workqueue.move_to_end(light, last=False)
        super()._assign_work_unit(node)


def _computes(scope: str) -> bool:
    return scope in SHARED and scope != WAITING


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesTogether:
    """Share the tests out in the order in which they are collected: what comes last is short."""
    config.option.loadscopereorder = False
    return FilesTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that share a server first: a worker takes all of them, and one that began late would end alone."""
    items.sort(key=lambda item: shared_by(item.nodeid) is None)


class FailuresAtOnce:
    """Tells a failure when it happens: a run that is cut short has no summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            told = str(report.longrepr) if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.when} of {report.nodeid} failed: {told[:2000]}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Tell failures in the process that writes to the terminal."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_collection_finish() -> None:
    """Keep the collected tests from the garbage collector: each look at all of them stops a test for seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def read_authorities_once() -> Iterator[None]:
    """Read the certificates of authorities once: httpx reads them for each new client, and no test speaks TLS by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx._transports.default, "create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield


def missing_service(name: str, reason: str) -> None:
    """Skip on a developer's machine; fail in CI, where every service must be there."""
    text = f"{name} cannot be reached: {reason}"
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(text)


def need_postgres() -> None:
    """Skip, or fail in CI, where no PostgreSQL answers."""
    try:
        psycopg.connect(DEFAULT_SERVER, connect_timeout=60).close()
    except psycopg.OperationalError as error:
        missing_service("PostgreSQL", str(error))


def need_redis() -> None:
    """Skip, or fail in CI, where no Redis can be started."""
    if shutil.which("redis-server") is None:
        missing_service("Redis", "redis-server is not installed")


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


@pytest.fixture(scope="session")
def migrated_postgres() -> Iterator[str]:
    """The async URL of a PostgreSQL database with the newest schema, to be copied: nobody is connected to it."""
    need_postgres()
    with throwaway_database() as url:
        upgrade(url)
        yield url


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """The async URL of an empty throw-away database."""
    need_postgres()
    with throwaway_database() as url:
        yield url


@pytest.fixture(scope="session")
def emptied_databases(migrated_postgres: str) -> Iterator[EmptiedDatabases]:
    """Databases with the newest schema that tests use one after the other."""
    with EmptiedDatabases(migrated_postgres) as databases:
        yield databases


@pytest.fixture
def migrated_postgres_url(emptied_databases: EmptiedDatabases) -> Iterator[str]:
    """The async URL of a database with the newest schema and without rows."""
    with emptied_databases.one() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh database of each kind, its schema the newest."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_database"), tmp_path / "weft.db")
        yield f"sqlite+aiosqlite:///{tmp_path}/weft.db"
        return
    yield request.getfixturevalue("migrated_postgres_url")
