"""A cluster whose PostgreSQL and Redis speak TLS alone and ask for a password, under the URLs of the how-to page."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from testing.certificates import Certificate
from testing.cluster_process import ClusterProcess, RedisProcess
from testing.operator_command import weft
from testing.postgres_process import PostgresProcess
from tests.conftest import missing_service, need_redis
from tests.e2e.raw_client import RawClient, pass_message

BASE = "weft/tiny"
PASSWORD = "a b@c/d:e%"


@dataclass(frozen=True, slots=True)
class Guarded:
    """Servers that speak TLS alone, and what clients need for them."""

    postgres: PostgresProcess
    redis: RedisProcess
    certificate: Certificate

    def environment(self, trusted: Path) -> dict[str, str]:
        """The settings of the how-to page, with the certificates that are trusted."""
        database = self.postgres.url().replace("postgresql:", "postgresql+asyncpg:")
        redis = self.redis.url.replace(str(self.certificate.file), str(trusted))
        return {
            "WEFT_DATABASE_URL": f"{database}?ssl=verify-full",
            "PGSSLROOTCERT": str(trusted),
            "WEFT_REDIS_URL": redis,
        }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    need_redis()
    if shutil.which("openssl") is None:
        missing_service("openssl", "it is not installed")
    folder = tmp_path_factory.mktemp("tls")
    made = Certificate.make(folder / "servers")
    try:
        postgres = PostgresProcess(certificate=made, password=PASSWORD)
    except FileNotFoundError as error:
        missing_service("PostgreSQL's programs", str(error))
    with postgres, RedisProcess(folder / "redis", certificate=made, password=PASSWORD) as redis:
        yield Guarded(postgres, redis, made)


def test_two_tenants_train_and_sample_where_every_connection_is_encrypted(
    guarded: Guarded, tiny_model_dir: Path, tmp_path: Path
) -> None:
    environment = guarded.environment(guarded.certificate.file)
    process = ClusterProcess(
        data=tmp_path / "data",
        base_models=[f"{BASE}={tiny_model_dir}"],
        database_url=environment["WEFT_DATABASE_URL"],
        redis_url=environment["WEFT_REDIS_URL"],
        options=["--apis", "2"],
        environment={"PGSSLROOTCERT": environment["PGSSLROOTCERT"], "OMP_NUM_THREADS": "1"},
    )
    with process:
        for name in ("cats", "dogs"):
            key = weft(tmp_path / "data", "tenant", "create", name, environment=environment).strip()
            client = RawClient(process.base_url, key)
            run = client.model(BASE)
            done = [client.passes(pass_message(run, 1, [1, 2, 3, 4])), client.step(run, 2, learning_rate=0.1)]
            done.append(client.post("/save_weights_for_sampler", model_id=run, path="one", seq_id=3))
            assert all("error" not in client.result(one) for one in done)
            asked = {"model": run, "prompt": [1, 2, 3], "max_tokens": 4}
            answer = client.http.post(f"{process.base_url}/v1/completions", json=asked, headers=bearer(key))
            assert answer.status_code == 200, answer.text
            client.close()
        url = f"{guarded.postgres.url()}?sslmode=verify-full&sslrootcert={guarded.certificate.file}"
        with psycopg.connect(url) as connection:
            told = (
                "SELECT count(*), bool_and(ssl) FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) WHERE usename <> ''"
            )
            (count, are_encrypted), *_ = connection.execute(told).fetchall()
        assert (count > 4, are_encrypted) == (True, True)


@pytest.mark.parametrize("part", ["database", "Redis"])
def test_servers_of_another_certificate_are_not_spoken_to(guarded: Guarded, tmp_path: Path, part: str) -> None:
    """The other server's certificate is trusted in each case, and its look is good."""
    right = guarded.environment(guarded.certificate.file)
    wrong = guarded.environment(Certificate.make(tmp_path / "other").file)
    names = ("WEFT_REDIS_URL",) if part == "Redis" else ("WEFT_DATABASE_URL", "PGSSLROOTCERT")
    environment = right | {name: wrong[name] for name in names}
    told = looked(tmp_path / "data", environment)
    assert told[part].startswith("FAIL"), told
    assert "certificate" in told[part].lower(), told[part]
    assert told["database" if part == "Redis" else "Redis"].startswith("ok"), told


def looked(data: Path, environment: dict[str, str]) -> dict[str, str]:
    """The lines of ``weft doctor`` by their part."""
    command = [sys.executable, "-m", "cli.main", "doctor", "--data", str(data)]
    ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    return {line[5:].partition(":")[0]: line for line in ended.stdout.splitlines() if ":" in line}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
