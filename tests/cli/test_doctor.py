"""``weft doctor``, on a real PostgreSQL and a Redis of its own."""

import asyncio
import os
import shutil
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from redis import Redis
from typer.testing import CliRunner

from cli.data_folder_check import check_data_folder
from cli.doctor import examine
from cli.finding import Finding
from cli.main import app
from migrations.upgrade import downgrade
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.settings import Settings
from store.tables import ProcessKind
from testing.cluster_process import RedisProcess
from tests.conftest import missing_service
from workers.leases.processes import new_identity, renew

BASE = "test/tiny"
Examine = Callable[..., dict[str, Finding]]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    if shutil.which("redis-server") is None:
        missing_service("redis-server", "it is not installed")
    with RedisProcess(tmp_path_factory.mktemp("redis")) as process:
        yield process


@pytest.fixture
def look(tmp_path: Path, tiny_model_dir: Path, migrated_postgres_url: str, redis: RedisProcess) -> Examine:
    """Return a function that examines a cluster with a current schema: findings by part; keywords are settings."""
    (tmp_path / "data").mkdir()

    def examined(**others: object) -> dict[str, Finding]:
        given: dict[str, object] = {
            "data_dir": tmp_path / "data",
            "database_url": migrated_postgres_url,
            "redis_url": redis.url,
            "base_models": (f"{BASE}={tiny_model_dir}",),
            "port": 0,
        }
        found = examine(Settings.model_validate({**given, **others}))
        return {finding.part: finding for finding in found}

    return examined


def test_a_cluster_that_is_not_started_is_well(look: Examine) -> None:
    found = look()
    assert [finding for finding in found.values() if not finding.is_well] == []
    assert "noeviction" in found["Redis memory"].text
    assert found["Redis"].text.endswith("0 processes listen on weft:wakeups")
    assert found[f"trainers of {BASE}"].text == "none is alive; start `weft worker`"
    assert found[f"pools of {BASE}"].mark == "note"
    assert found["recorded files"].mark == found["connections"].mark == found["clock"].mark == "ok  "


def test_without_redis_nothing_of_a_cluster_is_asked(look: Examine, tmp_path: Path) -> None:
    found = look(redis_url=None, database_url=None)
    assert list(found) == ["settings", "data folder", "database", "address", f"base model {BASE}"]


def test_a_sqlite_database_that_is_there_is_well(look: Examine, migrated_database: Path) -> None:
    assert look(database_url=f"sqlite:///{migrated_database}", redis_url=None)["database"].mark == "ok  "


@pytest.mark.parametrize("place", ["lost", "another"])
def test_a_data_folder_on_which_no_service_starts_is_told_without_a_cluster(
    look: Examine, migrated_database: Path, tmp_path: Path, place: str
) -> None:
    data = tmp_path / "data"
    shutil.copy(migrated_database, data / "weft.db")

    async def mark() -> None:
        database = Database(create_engine(f"sqlite+aiosqlite:///{data / 'weft.db'}"))
        await check_data_folder(database, DataFolder(data))
        await database.close()

    asyncio.run(mark())
    assert look(redis_url=None, database_url=None)["data folder"].is_well
    for file in data.glob("weft.db*"):
        file.unlink()
    if place == "another":
        shutil.copy(migrated_database, data / "weft.db")
    found = look(redis_url=None, database_url=None)["data folder"]
    assert (found.is_well, "belongs to another database" in found.text) == (False, True)


def test_a_cluster_on_another_databases_folder_is_told(look: Examine, tmp_path: Path) -> None:
    (tmp_path / "data" / "database-id").write_text("theirs\n")
    found = look()["data folder"]
    assert (found.is_well, "belongs to another database" in found.text) == (False, True)


@pytest.mark.parametrize(("seconds", "told"), [(60, "ahead of"), (-60, "behind")])
def test_a_clock_that_is_off_is_told_with_what_goes_by_it(
    look: Examine, monkeypatch: pytest.MonkeyPatch, seconds: float, told: str
) -> None:
    monkeypatch.setattr("cli.doctor_cluster.utc_now", lambda: utc_now() + timedelta(seconds=seconds))
    found = look()["clock"]
    assert (found.mark, f" s {told} the database's" in found.text) == ("note", True)
    assert "leases, expiries and timeouts go by the database's time" in found.text


def test_redis_without_postgresql_is_no_cluster(look: Examine) -> None:
    found = look(database_url=None)
    assert not found["cluster"].is_well
    assert "WEFT_DATABASE_URL" in found["cluster"].text


def test_a_redis_that_is_away_is_named_without_its_password(look: Examine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found = look(redis_url=f"redis://:secret@127.0.0.1:{taken.getsockname()[1]}/0")["Redis"]
    assert not found.is_well
    assert "WEFT_REDIS_URL" in found.text
    assert "secret" not in found.text


@pytest.mark.parametrize(
    ("policy", "mark"), [("allkeys-lru", "note"), ("noeviction", "ok  "), ("volatile-lru", "ok  ")]
)
def test_a_redis_that_evicts_is_advised_against(look: Examine, redis: RedisProcess, policy: str, mark: str) -> None:
    with Redis.from_url(redis.url) as client:
        client.config_set("maxmemory", "64mb")
        client.config_set("maxmemory-policy", policy)
        try:
            finding = look()["Redis memory"]
        finally:
            client.config_set("maxmemory", "0")
            client.config_set("maxmemory-policy", "noeviction")
    assert (finding.mark, policy in finding.text) == (mark, True)


def test_housekeeping_that_nobody_does_shows(look: Examine, redis: RedisProcess) -> None:
    with Redis.from_url(redis.url) as client:
        client.rpush("weft:celery:housekeeping", *(["x"] * 31))
        try:
            assert look()["housekeeping"].mark == "note"
        finally:
            client.delete("weft:celery:housekeeping")


def test_a_pool_larger_than_the_server_cannot_work(look: Examine, migrated_postgres_url: str) -> None:
    with psycopg.connect(migrated_postgres_url.replace("+asyncpg", "")) as connection:
        ((limit,),) = connection.execute("SHOW max_connections").fetchall()
    found = look(database_pool=int(str(limit)) + 1)["connections"]
    assert not found.is_well
    assert "max_connections" in found.text


def test_processes_are_told_with_their_last_sign_of_life(look: Examine, migrated_postgres_url: str) -> None:
    async def live() -> None:
        database = Database(create_engine(migrated_postgres_url))
        async with database.write() as transaction:
            for kind, lease in ((ProcessKind.TRAINER, 60), (ProcessKind.POOL, -1)):
                await renew(transaction, new_identity(kind, BASE), lease=timedelta(seconds=lease), clock=utc_now)
        await database.close()

    asyncio.run(live())
    found = look(lease=timedelta(seconds=60))
    trainers, pools = found[f"trainers of {BASE}"], found[f"pools of {BASE}"]
    assert trainers.mark == "ok  "
    assert f"(pid {os.getpid()})" in trainers.text
    assert trainers.text.endswith(" s ago")
    assert (pools.mark, pools.text.endswith("dead")) == ("note", True)


def test_a_data_folder_without_what_rows_name_is_another_one(
    look: Examine, migrated_postgres_url: str, tmp_path: Path
) -> None:
    rows = """
        INSERT INTO tenants (id, name, share, created_at) VALUES ('t', 't', 1, now());
        INSERT INTO sessions (id, tenant_id, tags, sdk_version, created_at, last_seen_at)
            VALUES ('s', 't', '[]', '0', now(), now());
        INSERT INTO runs (id, tenant_id, session_id, model_seq_id, base_model, rank, alpha, seed, train_attn, train_mlp,
                          train_unembed, state, next_seq_id, snapshot_seq_id, snapshot_dir, created_at, last_request_at)
            VALUES ('s:train:0', 't', 's', 0, 'b', 8, 16, 0, true, true, true, 'ready', 1, 0, 'snapshots/one', now(), now())
    """
    with psycopg.connect(migrated_postgres_url.replace("+asyncpg", "")) as connection:
        connection.execute(rows)
    missing = look()["recorded files"]
    assert not missing.is_well
    assert "snapshots/one" in missing.text
    (tmp_path / "data" / "snapshots" / "one").mkdir(parents=True)
    assert look()["recorded files"].is_well
    operation, insert = (
        str(uuid4()),
        "INSERT INTO operation_payloads (operation_id, tenant_id, body, file_digest) VALUES (%s, %s, '', 'd')",
    )
    with psycopg.connect(migrated_postgres_url.replace("+asyncpg", "")) as connection:
        connection.execute(insert, (operation, "t"))
    missing = look()["recorded files"]
    assert (missing.is_well, f"payloads/{operation[:2]}/{operation}" in missing.text) == (False, True)
    (tmp_path / "data" / "payloads" / operation[:2]).mkdir(parents=True)
    (tmp_path / "data" / "payloads" / operation[:2] / operation).write_bytes(b"d")
    assert look()["recorded files"].is_well


def test_a_restored_sqlite_database_whose_payload_file_is_missing_is_told(
    look: Examine, migrated_database: Path, tmp_path: Path
) -> None:
    copy, operation = tmp_path / "restored.db", str(uuid4())
    shutil.copy(migrated_database, copy)
    with closing(sqlite3.connect(copy)) as database:
        database.execute(
            "INSERT INTO tenants (id, name, share, created_at) VALUES ('t', 't', 1, '2026-01-01 00:00:00')"
        )
        payload = "INSERT INTO operation_payloads (operation_id, tenant_id, body, file_digest) VALUES (?, 't', '', 'd')"
        database.execute(payload, (operation,))
        database.commit()
    single = {"database_url": f"sqlite:///{copy}", "redis_url": None}
    missing = look(**single)["recorded files"]
    assert (missing.is_well, operation in missing.text) == (False, True)
    (tmp_path / "data" / "payloads" / operation[:2]).mkdir(parents=True)
    (tmp_path / "data" / "payloads" / operation[:2] / operation).write_bytes(b"d")
    assert look(**single)["recorded files"].is_well


def test_a_schema_that_is_behind_fails_and_the_rest_is_still_told(look: Examine, migrated_postgres_url: str) -> None:
    downgrade(migrated_postgres_url, "0006")
    found = look()
    assert "weft db upgrade" in found["database"].text
    assert not found["database"].is_well
    assert found["Redis"].is_well


def test_a_schema_that_is_newer_is_well(look: Examine, migrated_postgres_url: str) -> None:
    with psycopg.connect(migrated_postgres_url.replace("+asyncpg", "")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    found = look()
    assert (found["database"].mark, "newer" in found["database"].text) == ("ok  ", True)
    assert found["recorded files"].is_well


def test_housekeeping_is_run_beside_a_process_with_the_same_metrics_port(
    tmp_path: Path, migrated_postgres_url: str, redis: RedisProcess
) -> None:
    """An operator runs it where a process of the cluster runs, with its environment."""
    (tmp_path / "data").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = {
            "WEFT_DATABASE_URL": migrated_postgres_url,
            "WEFT_REDIS_URL": redis.url,
            "WEFT_METRICS_PORT": str(taken.getsockname()[1]),
            "WEFT_DATA_DIR": str(tmp_path / "data"),
        }
        ended = CliRunner().invoke(app, ["housekeeping", "run", "expire-links"], env=environment)
    assert (ended.exit_code, "expire-links" in ended.output) == (0, True), ended.output


def test_a_metrics_port_that_a_process_of_the_cluster_has_is_no_fault(look: Examine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert look(metrics_port=port)["metrics address"].mark == "note"
    assert look(metrics_port=port)["metrics address"].mark == "ok  "
    # An address of documents, which no machine has.
    assert look(metrics_port=port, metrics_host="192.0.2.1")["metrics address"].mark == "FAIL"


class Health(BaseHTTPRequestHandler):
    """A server whose ``/well/health`` answers 200; every other path answers 500."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/well/health" else 500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_words: object) -> None:
        return


def test_each_vllm_server_is_asked(look: Examine) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server, socket.socket() as silent:
        threading.Thread(target=server.serve_forever).start()
        # Bound, and nobody listens.
        silent.bind(("127.0.0.1", 0))
        alive, dead = (f"127.0.0.1:{port}" for port in (server.server_port, silent.getsockname()[1]))
        urls = (f"http://{alive}/well", f"{BASE}=http://user:secret@{dead}")
        found = look(vllm_urls=urls)
        ill = look(vllm_urls=(f"http://{alive}",))[f"vLLM server {alive}"]
        server.shutdown()
    assert found[f"vLLM server {alive}"].is_well
    assert (found[f"vLLM server {dead}"].is_well, ill.is_well) == (False, False)
    assert "WEFT_VLLM_URLS" in found[f"vLLM server {dead}"].text
    assert "500" in ill.text
    assert not look(vllm_urls=("127.0.0.1:1",))["vLLM servers"].is_well


def test_traces_need_their_libraries(look: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(otlp_endpoint="http://user:secret@collector:4318")["traces"].text == "go to collector:4318"
    monkeypatch.setitem(sys.modules, "telemetry.otlp", None)
    missing = look(otlp_endpoint="http://collector:4318")["traces"]
    assert (missing.is_well, "weft[traces]" in missing.text) == (False, True)


def test_an_address_that_an_api_of_the_cluster_shares_is_told_as_in_use(look: Examine) -> None:
    with socket.socket() as api:
        api.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        api.bind(("127.0.0.1", 0))
        api.listen()
        used = look(port=api.getsockname()[1])["address"]
        assert (used.is_well, "is in use, and can be shared" in used.text) == (True, True)
        assert not look(port=api.getsockname()[1], redis_url=None)["address"].is_well
        place = api.getsockname()[1]
    assert look(port=place)["address"].text.endswith("is free")


def test_a_data_folder_that_takes_no_file_is_told(look: Examine) -> None:
    found = look(data_dir=Path("/proc/self"))["data folder"]
    assert not found.is_well
