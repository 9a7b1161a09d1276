"""A cluster as child processes, which tests and benchmarks can kill: a Redis server and ``weft up``."""

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import psutil
import psycopg
from redis import Redis
from redis.exceptions import RedisError

from testing.certificates import Certificate
from testing.reserved_port import ReservedPort
from testing.service_process import ServiceProcess
from testing.tenants import make_tenants
from testing.throwaway_database import throwaway_database

_START_SECONDS = 60.0


class RedisProcess:
    """A Redis server that stores nothing on disk: restarted, it is empty. Use as a context manager."""

    def __init__(self, folder: Path, *, certificate: Certificate | None = None, password: str | None = None) -> None:
        """Speak TLS alone, where there is a ``certificate``."""
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self._folder = folder
        self._certificate = certificate
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL for clients."""
        account = "" if self._password is None else f":{quote(self._password, safe='')}@"
        if self._certificate is None:
            return f"redis://{account}127.0.0.1:{self.port}/0"
        return f"rediss://{account}localhost:{self.port}/0?ssl_ca_certs={self._certificate.file}"

    @property
    def _options(self) -> list[str]:
        port = str(self.port)
        asks = [] if self._password is None else ["--requirepass", self._password]
        if self._certificate is None:
            return ["--port", port, *asks]
        pair = ["--tls-cert-file", str(self._certificate.file), "--tls-key-file", str(self._certificate.key)]
        return ["--port", "0", "--tls-port", port, "--tls-auth-clients", "no", *pair, *asks]

    def start(self) -> None:
        """Start the server and wait until it answers. Raises ``RuntimeError`` when it does not."""
        self._folder.mkdir(parents=True, exist_ok=True)
        command = ["redis-server", *self._options, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([*command, "--dir", str(self._folder)], stdout=log, stderr=log)
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if time.monotonic() > deadline:
                raise RuntimeError("the Redis did not start")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with Redis.from_url(self.url) as client:
                client.ping()
        except RedisError:
            return False
        return True

    def kill(self) -> None:
        """Kill the server (SIGKILL) and wait until it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop the server (SIGSTOP): connections stay open, no request is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue a frozen server."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._reserved.close()


class ClusterProcess(ServiceProcess):
    """A ``weft up`` and its child processes of each kind: ``api``, ``worker``, ``pool``, ``beat``."""

    def __init__(
        self,
        *,
        data: Path,
        base_models: Sequence[str],
        database_url: str,
        redis_url: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        urls = {"WEFT_DATABASE_URL": database_url, "WEFT_REDIS_URL": redis_url}
        super().__init__(
            data=data,
            base_models=base_models,
            command=("up", *options),
            environment={**urls, **(environment or {})},
        )
        self.database_url = database_url

    def children(self, kind: str) -> list[psutil.Process]:
        """Return the running processes of a kind."""
        found = []
        for child in psutil.Process(self.pid).children():
            try:
                words = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "cli.main" in words and words[words.index("cli.main") + 1] == kind:
                found.append(child)
        return found

    def kill_child(self, process: psutil.Process) -> None:
        """Kill a child (SIGKILL); the supervisor starts another."""
        process.send_signal(signal.SIGKILL)

    def query(self, statement: str, *parameters: object) -> list[tuple[object, ...]]:
        """Return the rows of a statement on the cluster's database."""
        url = self.database_url.replace("postgresql+asyncpg", "postgresql")
        with psycopg.connect(url) as connection:
            return connection.execute(statement.encode(), parameters).fetchall()


@contextmanager
def started_service(
    *,
    data: Path,
    base_models: Sequence[str],
    tenants: Sequence[str],
    environment: Mapping[str, str] | None = None,
    is_cluster: bool = False,
) -> Iterator[tuple[ServiceProcess, list[str]]]:
    """Start ``weft serve``, or ``weft up`` on services of its own; yield it with a key for each new tenant."""
    with ExitStack() as stack:
        if not is_cluster:
            keys = make_tenants(data, list(tenants))
            serve = ServiceProcess(data=data, base_models=base_models, environment=environment)
            yield stack.enter_context(serve), keys
            return
        url = stack.enter_context(throwaway_database())
        redis = stack.enter_context(RedisProcess(data.parent / "redis"))
        cluster = ClusterProcess(
            data=data, base_models=base_models, database_url=url, redis_url=redis.url, environment=environment
        )
        stack.enter_context(cluster)
        yield cluster, make_tenants(data, list(tenants), database_url=url)
