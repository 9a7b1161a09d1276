"""The first start of a service in a fresh folder makes one key, which it prints once; no other key opens any door."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from testing.service_process import ServiceProcess
from tests.e2e.conftest import BASE_NAME, make_tenant
from tests.e2e.test_observability import free_port

USUAL_KEYS = (
    "admin",
    "administrator",
    "changeme",
    "default",
    "operator",
    "password",
    "root",
    "secret",
    "sk-1234",
    "test",
    "tml-",
    "tml-admin",
    "tml-000000000000-0000000000000000000000000000000000000000000",
    "weft",
)


class Started(NamedTuple):
    """A service after its first and its second start in one folder: what each printed, and the doors.

    ``made``: rows of tenants, their keys and operators' keys after the first one.
    """

    data: Path
    process: ServiceProcess
    doors: tuple[str, str]
    first: str
    second: str
    made: tuple[list[sqlite3.Row], list[sqlite3.Row], list[sqlite3.Row]]


def rows(data: Path, table: str) -> list[sqlite3.Row]:
    with closing(sqlite3.connect(data / "weft.db")) as database:
        database.row_factory = sqlite3.Row
        return database.execute(f"SELECT * FROM {table}").fetchall()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Started]:
    data, port = tmp_path_factory.mktemp("fresh") / "data", free_port()
    process = ServiceProcess(
        data=data, base_models=[f"{BASE_NAME}={tiny_model_dir}"], environment={"WEFT_ADMIN_PORT": str(port)}
    )
    with process:
        first = process.printed_tail()
    made = (rows(data, "tenants"), rows(data, "api_keys"), rows(data, "operator_keys"))
    with process:
        second = process.printed_tail().removeprefix(first)
        doors = (f"{process.base_url}/api/v1/sessions", f"http://127.0.0.1:{port}/admin/v1/tenants")
        yield Started(data, process, doors, first, second, made)


def test_the_first_start_makes_one_key_of_one_tenant_and_no_operators(started: Started) -> None:
    (tenant,), (key,), operators = started.made
    assert (tenant["name"], key["tenant_id"], key["role"]) == ("default", tenant["id"], "admin")
    assert operators == []
    secret = started.process.first_key
    assert secret is not None
    assert secret.startswith(f"{key['prefix']}-")
    assert started.first.count(secret) == 1
    assert httpx.get(started.doors[0], headers={"X-API-Key": secret}, timeout=60).status_code == 200
    assert httpx.get(started.doors[1], headers={"X-API-Key": secret}, timeout=60).status_code == 401, (
        "a tenant's is no operator's"
    )


def test_the_key_is_told_at_the_first_start_alone(started: Started) -> None:
    """Nothing that the service keeps has it either."""
    secret = started.process.first_key
    assert secret is not None
    assert "TINKER_BASE_URL" in started.second
    assert "export TINKER_API_KEY" not in started.second
    assert "tml-" not in started.second
    assert "#" not in started.second, "no link that logs in"
    _, _, hidden = secret.partition("-")[2].partition("-")
    kept = [path for path in started.data.rglob("*") if path.is_file()]
    assert started.data / "weft.db" in kept
    assert [path for path in kept if hidden.encode() in path.read_bytes()] == []
    assert hidden not in started.process.log_tail(10**7)


@pytest.mark.parametrize("door", [0, 1], ids=["tenants", "operators"])
def test_no_empty_and_no_usual_key_opens_a_door(started: Started, door: int) -> None:
    """A second tenant's key opens its own door meanwhile."""
    url = started.doors[door]
    with httpx.Client(timeout=60) as http:
        assert http.get(url).status_code == 401
        for key in ("", *USUAL_KEYS):
            for headers in ({"X-API-Key": key}, {"Authorization": f"Bearer {key}".strip()}):
                assert http.get(url, headers=headers).status_code == 401, headers
        own = make_tenant(started.data, f"of-door-{door}")
        assert http.get(started.doors[0], headers={"X-API-Key": own}).status_code == 200
