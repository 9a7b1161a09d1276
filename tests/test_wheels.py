"""The wheels of the server and of the client, built without a network: each has what it needs, and nothing of the other."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

CLIENT = Path("clients/python")
_BUILD = "import setuptools.build_meta, sys; setuptools.build_meta.build_wheel(sys.argv[1])"
_LOAD_CLIENT = """
import importlib, pkgutil, sys
sys.path += sys.argv[1:]
import httpx, weft_client
for module in pkgutil.iter_modules(weft_client.__path__, "weft_client."):
    importlib.import_module(module.name)
answer = httpx.MockTransport(lambda request: httpx.Response(200, json={"jobs": []}))
with weft_client.Weft("http://nowhere", "tml-x", http=httpx.Client(transport=answer)) as weft:
    print(weft_client.__file__, weft.jobs.list())
"""


def servers_packages() -> list[str]:
    """Return the names of the packages that the server's wheel has."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    return [name.removesuffix("*") for name in found["find"]["include"]]


def files_below(folder: Path) -> set[str]:
    """Return the paths of all files in the folder but compiled code."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def built(source: Path, folder: Path) -> Path:
    """Build a copy's wheel, and return the folder into which it was unpacked."""
    subprocess.run([sys.executable, "-c", _BUILD, str(folder)], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "unpacked")
    return folder / "unpacked"


def copied(folder: Path, *names: str, of: Path = ROOT) -> Path:
    """Copy these files and folders: a build leaves its own files beside them."""
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in names:
        if (of / name).is_dir():
            shutil.copytree(of / name, folder / name, ignore=skipped)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(of / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's wheel, unpacked; it is built where the client lies beside it, as in the repository."""
    folder = tmp_path_factory.mktemp("server")
    names = [*servers_packages(), str(CLIENT), "pyproject.toml", "README.md", "LICENSE"]
    (folder / "source/clients").mkdir(parents=True)
    return built(copied(folder / "source", *names), folder)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's wheel, unpacked."""
    folder = tmp_path_factory.mktemp("client")
    return built(copied(folder / "source", "src", "pyproject.toml", "README.md", of=ROOT / CLIENT), folder)


def own_files(wheel: Path) -> set[str]:
    return {name for name in files_below(wheel) if ".dist-info/" not in name}


def test_the_servers_wheel_has_every_file_of_its_packages_and_no_other(server: Path) -> None:
    expected = {f"{package}/{name}" for package in servers_packages() for name in files_below(ROOT / package)}
    assert own_files(server) == expected
    assert {
        "api/dashboard/templates/login.html",
        "api/dashboard/static/vendor/htmx.min.js",
        "migrations/script.py.mako",
    } <= expected


def test_a_command_of_the_servers_wheel_makes_a_database(server: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(server)}
    program = "import cli.main; print(cli.main.__file__); cli.main.app()"
    command = [sys.executable, "-P", "-c", program, "tenant", "create", "cats", "--data", str(tmp_path / "data")]
    made = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    place, key = made.stdout.split()
    assert Path(place).is_relative_to(server)
    assert key.startswith("tml-")


def requirements(name: str) -> Iterator[str]:
    """Yield the names of what an installed distribution needs, directly or not, and its own."""
    yield canonicalize_name(name)
    for text in distribution(name).requires or ():
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield from requirements(needed.name)


def linked(folder: Path, names: set[str]) -> Path:
    """Link what these distributions install, and nothing else, into a folder."""
    folder.mkdir()
    for name in names:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if ".." not in file.parts} - {"__pycache__"}:
            (folder / top).symlink_to(str(found.locate_file(top)))
    return folder


def test_the_clients_wheel_works_with_httpx_and_pydantic_alone(client: Path, tmp_path: Path) -> None:
    sources = files_below(ROOT / CLIENT / "src/weft_client")
    assert own_files(client) == {f"weft_client/{name}" for name in sources}
    assert "py.typed" in sources
    (metadata,) = client.glob("*.dist-info/METADATA")
    needed = {
        Requirement(line.partition(": ")[2]).name
        for line in metadata.read_text().splitlines()
        if line.startswith("Requires-Dist: ")
    }
    assert needed == {"httpx", "pydantic"}
    libraries = linked(tmp_path / "libraries", {part for name in needed for part in requirements(name)})
    # No installed package but those that are linked.
    command = [sys.executable, "-I", "-S", "-c", _LOAD_CLIENT, str(client), str(libraries)]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True)
    assert loaded.stdout.split() == [str(client / "weft_client/__init__.py"), "jobs=[]"]
