"""compose.yaml and the Dockerfile name only what is there. Docker is not needed: nothing is built or run."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import yaml

from store.settings import Settings
from tests.conftest import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
WEFT = {name: service for name, service in COMPOSE["services"].items() if service["image"] == "weft"}
SETTINGS = {f"WEFT_{name.upper()}" for name in Settings.model_fields} | {"WEFT_CONFIG"}


def _command(name: str) -> list[str]:
    return shlex.split(WEFT[name]["command"])


def test_every_process_of_a_cluster_is_there() -> None:
    assert sorted(_command(name)[0] for name in WEFT) == ["api", "api", "beat", "db", "pool", "worker"]


@pytest.mark.parametrize("file", ["compose.yaml", "Dockerfile", "examples/weft.toml"])
def test_every_variable_is_a_setting(file: str) -> None:
    named = set(re.findall(r"\bWEFT_[A-Z_]+[A-Z]\b", (ROOT / file).read_text()))
    assert named - SETTINGS == set()


@pytest.mark.parametrize("name", sorted(WEFT))
def test_every_command_exists(name: str) -> None:
    """The command line itself, up to its help."""
    found = subprocess.run(
        [sys.executable, "-m", "cli.main", *_command(name), "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert found.returncode == 0, found.stderr
    assert "Usage:" in found.stdout


@pytest.mark.parametrize("name", sorted(WEFT))
def test_every_service_has_settings_that_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in WEFT[name]["environment"].items():
        monkeypatch.setenv(variable, re.sub(r"\$\{\w+(:-(?P<default>[^}]*)|:\?[^}]*)?\}", r"\g<default>", value))
    settings = Settings()
    assert settings.base_models == ("my/base=/models/base",)
    assert settings.metrics_port is not None


def test_migrations_run_before_everybody_else() -> None:
    for name in WEFT.keys() - {"migrate"}:
        assert WEFT[name]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}
    assert _command("migrate") == ["db", "upgrade"]
    assert WEFT["migrate"]["restart"] == "no"


def test_whoever_reads_or_writes_adapters_shares_the_data_folder() -> None:
    for name in WEFT:
        assert f"data:{WEFT[name]['environment']['WEFT_DATA_DIR']}" in WEFT[name]["volumes"]


def test_dependencies_are_named_services_and_those_waited_for_have_health() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "test" in services[other]["healthcheck"]


def test_the_images_copy_what_is_packaged_and_run_as_nobody_special() -> None:
    copied = re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert sorted(copied) == [
        "api",
        "cli",
        "contracts",
        "engine",
        "ledger",
        "migrations",
        "store",
        "telemetry",
        "tenants",
        "workers",
    ]
    assert all(f"!{package}" in ignored and (ROOT / package).is_dir() for package in copied)
    assert re.search(r"^USER weft$", DOCKERFILE, re.MULTILINE)
    assert 'ENTRYPOINT ["weft"]' in DOCKERFILE


def test_the_health_check_asks_the_metrics_port() -> None:
    """The command as the image has it: 0 beside a process that is alive, else not."""
    (line,) = re.findall(r"^    CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)
    command = [sys.executable, *json.loads(line)[1:]]
    with HTTPServer(("127.0.0.1", 0), _Alive) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {**os.environ, "WEFT_METRICS_PORT": str(server.server_port)}
        assert subprocess.run(command, env=environment, capture_output=True).returncode == 0
        server.shutdown()
    assert subprocess.run(command, env=environment, capture_output=True).returncode != 0


class _Alive(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        return


def test_torch_is_the_one_that_is_pinned() -> None:
    (version,) = re.findall(r"^ARG TORCH_VERSION=(.+)$", DOCKERFILE, re.MULTILINE)
    assert f'"torch=={version}"' in (ROOT / "pyproject.toml").read_text()


def test_every_container_is_confined() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert {"mem_limit", "pids_limit"} <= service.keys(), name


def test_the_overlay_for_gpus_gives_them_to_the_trainer_and_changes_nothing_else() -> None:
    class Loader(yaml.SafeLoader):
        """Knows Compose's word for a list that takes another one's place."""

    Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))
    text = (ROOT / "compose.gpu.yaml").read_text()
    overlay = yaml.load(text, Loader)
    (name, changes), *others = overlay["services"].items()
    assert others == []
    assert _command(name) == ["worker"]
    (device,) = changes["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert [place.partition(":")[0] for place in changes["tmpfs"]] == WEFT[name]["tmpfs"]
    assert all(place.endswith(":exec") for place in changes["tmpfs"])
    assert not changes.keys() & {"security_opt", "cap_drop", "cap_add", "read_only", "pids_limit"}
    assert "compose.gpu.yaml" in (ROOT / "docs/how-to/run-a-cluster.md").read_text()


def test_redis_asks_for_a_password() -> None:
    assert "--requirepass ${REDIS_PASSWORD:?}" in COMPOSE["services"]["redis"]["command"]
    assert all(":${REDIS_PASSWORD:?}@" in service["environment"]["WEFT_REDIS_URL"] for service in WEFT.values())


def test_the_image_installs_the_pinned_versions_by_their_hashes() -> None:
    assert "--require-hashes -r requirements.lock" in DOCKERFILE
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {re.sub("[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    locked = re.split(r"(?m)^(?=[A-Za-z0-9])", (ROOT / "requirements.lock").read_text())[1:]
    found = {}
    for entry in locked:
        name, version = re.match(r"([^=\s]+)==([^\s;]+)", entry).groups()  # type: ignore[union-attr]
        assert "--hash=sha256:" in entry, name
        found[re.sub("[-_.]+", "-", name).lower()] = version
    assert {name: version for name, version in found.items() if pinned.get(name, version) != version} == {}
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = wanted["optional-dependencies"]
    for requirement in wanted["dependencies"] + extras["cluster"] + extras["traces"]:
        name = re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower()  # type: ignore[index]
        assert name == "torch" or re.sub("[-_.]+", "-", name) in found
