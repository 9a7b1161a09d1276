"""A PostgreSQL server of its own, which tests and benchmarks can stop and start."""

import os
import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Self
from urllib.parse import quote

from testing.certificates import Certificate
from testing.reserved_port import ReservedPort

_START_SECONDS = "60"
_ACCOUNT = "postgres"
"""Account that runs the server where this process is root, as which PostgreSQL refuses to run."""


class PostgresProcess:
    """A server on a free loopback port. Use as a context manager."""

    def __init__(self, *, certificate: Certificate | None = None, password: str | None = None) -> None:
        """Trust every connection; with a ``certificate`` and a ``password``, those by TLS that know it.

        Raises ``FileNotFoundError`` where PostgreSQL is not installed.
        """
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        # A folder that the server's account reaches, wherever this process keeps its own.
        self._folder = Path(mkdtemp(prefix="weft-postgres-"))
        self._programs = _programs()
        self._account = _ACCOUNT if os.geteuid() == 0 else None
        self._certificate = certificate
        self._password = password

    def url(self, database: str = "postgres") -> str:
        """Return the URL of one of its databases, as psycopg reads it."""
        if self._certificate is None or self._password is None:
            return f"postgresql://{_ACCOUNT}@127.0.0.1:{self.port}/{database}"
        return f"postgresql://{_ACCOUNT}:{quote(self._password, safe='')}@localhost:{self.port}/{database}"

    def start(self) -> None:
        """Start the server and wait until it answers. Raises ``subprocess.CalledProcessError``."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c max_connections=200"
        self._run("pg_ctl", "start", "-w", "-t", _START_SECONDS, "-l", str(self._folder / "log"), "-o", options)

    def stop(self) -> None:
        """End the server: every connection breaks, what is committed stays. Raises ``subprocess.CalledProcessError``."""
        self._run("pg_ctl", "stop", "-w", "-m", "fast")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), "-D", str(self._folder / "data"), *arguments]
        subprocess.run(command, check=True, user=self._account, stdout=subprocess.DEVNULL, cwd=self._folder)

    def __enter__(self) -> Self:
        if self._account is not None:
            shutil.chown(self._folder, self._account)
        if self._certificate is None or self._password is None:
            self._run("initdb", "-U", _ACCOUNT, "-A", "trust", "--no-sync")
        else:
            self._make_guarded(self._certificate, self._password)
        self.start()
        return self

    def _make_guarded(self, certificate: Certificate, password: str) -> None:
        secret = self._folder / "password"
        secret.write_text(password)
        # A key that others may read is refused.
        for source, name in ((certificate.file, "server.crt"), (certificate.key, "server.key")):
            shutil.copyfile(source, self._folder / name)
            (self._folder / name).chmod(0o600)
        if self._account is not None:
            for name in ("password", "server.crt", "server.key"):
                shutil.chown(self._folder / name, self._account)
        self._run("initdb", "-U", _ACCOUNT, "-A", "scram-sha-256", f"--pwfile={secret}", "--no-sync")
        (self._folder / "data" / "pg_hba.conf").write_text("hostssl all all all scram-sha-256\n")
        with (self._folder / "data" / "postgresql.conf").open("a") as settings:
            pair = f"ssl_cert_file = '{self._folder}/server.crt'\nssl_key_file = '{self._folder}/server.key'\n"
            settings.write(f"ssl = on\n{pair}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self._reserved.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def _programs() -> Path:
    """Return the folder of the newest installed PostgreSQL's programs. Raises ``FileNotFoundError``."""
    on_path = shutil.which("pg_ctl")
    if on_path is not None:
        return Path(on_path).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    if not installed:
        raise FileNotFoundError(
            "no PostgreSQL server is installed; pg_ctl is neither on the path nor where Debian puts it"
        )
    return installed[-1].parent
