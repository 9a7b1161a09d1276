"""The cluster that the faults strike, with every server behind it, and the tenants who must not notice."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.chaos import injected
from contracts.base_model import BaseModelFacts, read_base_model_facts
from engine.model.tiny_model import write_tiny_model
from testing.cluster_process import ClusterProcess, RedisProcess
from testing.commit_proxy import CommitProxy
from testing.postgres_process import PostgresProcess
from testing.tenants import make_tenants

BASE = "weft/tiny"
STALL_SECONDS = 10
"""The cluster's ``WEFT_STALL_LIMIT``: a pass on the tiny base takes far less."""
_TICK_SECONDS = 0.05
_FAULT_SECONDS = 240.0
"""Longest time for which a fault lasts: a process that starts on a busy machine took 80 s."""


class FaultNotOverError(Exception):
    """A fault did not end in time."""


@dataclass(frozen=True, slots=True)
class Ground:
    """A running cluster: two APIs, two trainers, two pools, and the servers behind them."""

    cluster: ClusterProcess
    redis: RedisProcess
    postgres: PostgresProcess
    commits: CommitProxy
    data: Path
    orders: Path
    facts: BaseModelFacts

    def order(self, fault: str) -> None:
        """Order a fault from the process that comes first (``bench.chaos.injected``)."""
        (self.orders / fault).touch()

    def is_taken(self, fault: str) -> bool:
        """Return whether a process has taken the order."""
        return not (self.orders / fault).exists()

    def weft(self, *arguments: str) -> str:
        """Run a ``weft`` command on the cluster's database and return its output. Raises ``subprocess.CalledProcessError``."""
        command = [sys.executable, "-m", "cli.main", *arguments, "--data", str(self.data)]
        found = subprocess.run(
            command, env=self.cluster.environment, check=True, capture_output=True, text=True, timeout=_FAULT_SECONDS
        )
        return found.stdout

    def until(self, holds: Callable[[], bool], what: str, *, seconds: float = _FAULT_SECONDS) -> None:
        """Wait until ``holds``. Raises ``FaultNotOverError`` after ``seconds``."""
        ends, tick = time.monotonic() + seconds, threading.Event()
        while not holds():
            if time.monotonic() > ends:
                raise FaultNotOverError(f"not within {seconds:.0f} s: {what}")
            tick.wait(_TICK_SECONDS)

    def until_replaced(self, process: psutil.Process, kind: str) -> None:
        """Wait until the process has ended and another of its kind has a lease; an API has none and must listen."""
        self.until(lambda: not process.is_running(), f"{kind} {process.pid} ended")
        wanted = {"worker": "trainer", "pool": "pool"}.get(kind)
        if wanted is None:
            self.until(lambda: sum(map(_listens, self.cluster.children(kind))) == 2, f"two of {kind} listen")
        else:
            self.until(lambda: self._leased(wanted) == 2, f"two of {kind} have leases")

    def _leased(self, kind: str) -> int:
        statement = "SELECT count(*) FROM worker_processes WHERE kind = %s AND expires_at > clock_timestamp()"
        ((found,),) = self.cluster.query(statement, kind)
        return int(str(found))


def _listens(process: psutil.Process) -> bool:
    try:
        return any(found.status == psutil.CONN_LISTEN for found in process.net_connections("tcp"))
    except psutil.NoSuchProcess:
        return False


@contextmanager
def started_ground(folder: Path) -> Iterator[Ground]:
    """Start the servers and the cluster in ``folder``, and end them."""
    model, orders = folder / "tiny", folder / "orders"
    write_tiny_model(model)
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(folder / "redis"))
        postgres = stack.enter_context(PostgresProcess())
        commits = stack.enter_context(CommitProxy("127.0.0.1", postgres.port, marker=""))
        commits.disarm()
        database = postgres.url().replace("postgresql://", "postgresql+asyncpg://")
        cluster = ClusterProcess(
            data=folder / "data",
            base_models=[f"{BASE}={model}"],
            database_url=database.replace(str(postgres.port), str(commits.port)),
            redis_url=redis.url,
            options=["--apis", "2", "--trainers", "2", "--pools", "2"],
            environment={
                "WEFT_SNAPSHOT_OPERATIONS": "16",
                # Longer than a client waits for an answer, and no longer: rows are pruned under faults, too.
                "WEFT_RESULT_GRACE": "PT4M",
                "WEFT_RETENTION_OPERATIONS": "PT0S",
                "WEFT_HOUSEKEEPING_INTERVAL": "PT10S",
                "WEFT_STALL_LIMIT": str(STALL_SECONDS),
                "OMP_NUM_THREADS": "1",
                **injected.environment(orders),
            },
        )
        stack.enter_context(cluster)
        facts = read_base_model_facts(BASE, model, None)
        yield Ground(cluster, redis, postgres, commits, folder / "data", orders, facts)


def keys_of(ground: Ground, names: list[str]) -> list[str]:
    """Make a tenant for each name and return their keys."""
    return make_tenants(ground.data, names, database_url=ground.cluster.database_url)
