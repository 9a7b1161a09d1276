"""A whole cluster: two APIs, two trainers, two pools on the tiny base, its own Redis, PostgreSQL behind a proxy."""

import gc
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from sqlalchemy.engine import make_url

from bench.chaos.tenant import ChaosTenant
from bench.chaos.verdict import judge, wait_for_recovery
from cli.administration import on_database
from contracts.base_model import read_base_model_facts
from engine.model.base import BaseModel
from store.settings import Settings
from testing.cluster_process import ClusterProcess, RedisProcess
from testing.tcp_proxy import TcpProxy
from testing.tenants import new_tenant
from testing.throwaway_database import throwaway_database
from tests.conftest import need_postgres, need_redis

BASE = "weft/tiny"
DEADLINE = 300.0
_FIRST_PORT, _LAST_PORT = 20_000, 32_000
LEASE_SECONDS = 5.0
PAUSE_SECONDS = 0.2
"""Pause of a tenant after each answer: without one, tenants take the processors from processes that start again."""
PROCESSES = 6
"""Processes with metrics: two of each kind."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster, as tests act on it."""

    process: ClusterProcess
    redis: RedisProcess
    postgres: TcpProxy
    data: Path
    base: BaseModel
    metrics_port: int
    """Metrics port of the first process; the others' follow it."""
    admin_port: int

    def tenant_key(self, name: str) -> str:
        """Make a tenant and return its key."""
        settings = Settings(data_dir=self.data, database_url=self.process.database_url)
        key: str = on_database(settings, lambda database: new_tenant(database, name))
        return key

    def tenant(self, number: int, key: str) -> ChaosTenant:
        """Return a tenant that trains and samples, not started yet."""
        return ChaosTenant(
            number,
            base_url=self.process.base_url,
            key=key,
            base_model=BASE,
            vocabulary=self.base.facts.vocabulary_size,
            pause=PAUSE_SECONDS,
        )

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until ``holds``; fail with ``what`` after ``DEADLINE``."""
        deadline = time.monotonic() + DEADLINE
        while not holds():
            assert time.monotonic() < deadline, f"{what}, within {DEADLINE:.0f} s\n{self.process.printed_tail(6000)}"
            time.sleep(0.05)

    def living(self, kind: str) -> list[tuple[object, ...]]:
        """Return id and pid of the processes of a kind whose lease stands."""
        return self.process.query(
            "SELECT id, pid FROM worker_processes WHERE kind = %s AND expires_at > clock_timestamp()", kind
        )

    def settle(self) -> None:
        """Wait until every process is back and ready."""
        self.until(
            lambda: len(self.living("trainer")) == len(self.living("pool")) == len(self.process.children("api")) == 2,
            "two of each are there",
        )
        self.until(lambda: self.is_ready() and not self.misses_redis(), "all are ready")

    def is_ready(self) -> bool:
        """Return whether every process reports that it is ready."""
        try:
            return all(answer.status_code == 200 for answer in self._readiness())
        except httpx.TransportError:
            return False

    def misses_redis(self) -> bool:
        """Return whether a process reports that Redis does not answer."""
        parts = [answer.json()["parts"] for answer in self._readiness()]
        return any(one["redis"] != "ok" or one.get("requests", "ok") != "ok" for one in parts)

    def counts_requests_apart(self) -> bool:
        """Return whether both API processes report that each counts requests by itself."""
        told = [answer.json()["parts"].get("requests", "") for answer in self._readiness()]
        return sum("by itself" in one for one in told) == 2

    def _readiness(self) -> list[httpx.Response]:
        return [
            httpx.get(f"http://127.0.0.1:{self.metrics_port + number}/readyz", timeout=10)
            for number in range(PROCESSES)
        ]


def free_ports(count: int) -> int:
    """Return the first of ``count`` free ports in a row.

    They lie below those that the system gives to clients: a client of another test could take one while its process restarts.
    """
    for port in random.sample(range(_FIRST_PORT, _LAST_PORT - count), k=_LAST_PORT - count - _FIRST_PORT):
        with ExitStack() as stack:
            try:
                for offset in range(count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            except OSError:
                continue
            return port
    raise RuntimeError("no ports in a row are free")


@pytest.fixture(scope="package")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Cluster]:
    """A cluster, started once for all tests."""
    folder = tmp_path_factory.mktemp("cluster")
    need_redis()
    need_postgres()
    facts = read_base_model_facts(BASE, tiny_model_dir, None)
    metrics_port = free_ports(PROCESSES + 1)
    admin_port = metrics_port + PROCESSES
    with ExitStack() as stack:
        url = make_url(stack.enter_context(throwaway_database()))
        proxy = stack.enter_context(TcpProxy(url.host or "127.0.0.1", url.port or 5432))
        redis = stack.enter_context(RedisProcess(folder / "redis"))
        process = stack.enter_context(
            ClusterProcess(
                data=folder / "data",
                base_models=[f"{BASE}={tiny_model_dir}"],
                database_url=url.set(port=proxy.port).render_as_string(hide_password=False),
                redis_url=redis.url,
                options=["--apis", "2", "--trainers", "2", "--pools", "2"],
                environment={
                    "WEFT_SNAPSHOT_OPERATIONS": "16",
                    "WEFT_LEASE": f"PT{LEASE_SECONDS}S",
                    "WEFT_METRICS_PORT": str(metrics_port),
                    "WEFT_ADMIN_PORT": str(admin_port),
                    "OMP_NUM_THREADS": "1",
                    # One poll for all samples of a client, so that every fault strikes these polls, too.
                    "WEFT_SDK_JOINT_POLLS": "true",
                },
            )
        )
        yield Cluster(process, redis, proxy, folder / "data", BaseModel.load(facts), metrics_port, admin_port)


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with every process ready."""
    whole_cluster.settle()
    yield whole_cluster
    # What the SDK leaves to the garbage collector is reported here, where it is expected, not in some later test.
    gc.collect()


@contextmanager
def at_work(cluster: Cluster, *names: str) -> Iterator[list[ChaosTenant]]:
    """Have new tenants train and sample inside the block; afterwards no operation may be lost, doubled, hung or different."""
    keys = [cluster.tenant_key(name) for name in names]
    tenants = [cluster.tenant(number, key) for number, key in enumerate(keys)]
    for tenant in tenants:
        tenant.start()
    try:
        assert recovered(tenants, time.monotonic()), "nobody could work before anything happened"
        yield tenants
    except BaseException:
        print(cluster.process.printed_tail(20_000))
        raise
    finally:
        for tenant in tenants:
            tenant.stop()
    for tenant in tenants:
        assert tenant.account.lost == []
        assert tenant.account.hung == 0
    verdict = judge(tenants, cluster.process, cluster.data, cluster.base)
    assert verdict["doubled_effects"] == verdict["lost_operations"] == 0
    assert verdict["max_relative_weight_error"] <= 1e-5


def recovered(tenants: list[ChaosTenant], since: float) -> bool:
    """Wait until every tenant has answers to requests sent after ``since``; return whether all did."""
    accounts = [tenant.account for tenant in tenants]
    if wait_for_recovery(accounts, since) is not None:
        return True
    for account in accounts:
        print(
            f"lost {account.lost}, hung {account.hung}, {account.steps} steps; seconds since {time.monotonic() - since:.1f};"
        )
        for kind, answers in (("steps", account.trained), ("samples", account.sampled)):
            last = answers[-1] if answers else None
            print(
                f"  the last of the {kind}:",
                last and f"sent {last.sent - since:.1f}, answered {last.answered - since:.1f}",
            )
    return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings about connections: the SDK leaves its own to the garbage collector, killed processes leave theirs open."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
