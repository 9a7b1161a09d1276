"""Files of the dashboard: vendored ones are as released, own ones hold nothing that a policy or a careful reader forbids."""

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT

DASHBOARD = ROOT / "api" / "dashboard"
LISTS = (DASHBOARD / "vendor.toml", ROOT / "tests" / "ui" / "vendor.toml")
LICENCES = {"0BSD", "MIT", "MPL-2.0"}
FORBIDDEN = re.compile(
    r"\|\s*safe\b|Markup\(|\son[a-z]+=|\son[a-z]+\s*=\s*['\"]|hx-on|\bjs:|innerHTML\s*=|outerHTML|insertAdjacentHTML|document\.write|\sstyle\s*=|"
    r"\beval\(|new Function|<script(?![^>]*(src=|application/json))|<style|https?://(?!127\.0\.0\.1)|autoescape false"
    r"|[\"'(=]\s*//\w"
)
OWN = sorted(
    path
    for path in DASHBOARD.rglob("*")
    if path.suffix in {".html", ".js", ".css"} and "vendor" not in path.relative_to(DASHBOARD).parts
)


@pytest.mark.parametrize("listed", LISTS, ids=lambda path: path.parent.name)
def test_vendored_files_are_as_released(listed: Path) -> None:
    packages = tomllib.loads(listed.read_text())["package"]
    named = {listed.parent / file["to"] for package in packages for file in package["files"]}
    folder = next(iter(named)).parent
    assert {path for path in folder.rglob("*") if path.is_file()} == named
    for package in packages:
        assert package["licence"] in LICENCES
        assert any("LICENSE" in file["to"] for file in package["files"])
        for file in package["files"]:
            content = (listed.parent / file["to"]).read_bytes()
            assert hashlib.sha512(content).hexdigest() == file["sha512"], file["to"]


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_files_trust_no_text_and_load_nothing_from_elsewhere(path: Path) -> None:
    found = [
        f"{number}: {line.strip()}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert found == []


def test_the_list_of_forbidden_things_finds_them() -> None:
    for text in (
        "{{ a|safe }}",
        '<p onclick="x">',
        '<b hx-on:click="x">',
        "a.innerHTML = b",
        '<i style="x">',
        "<script>x",
    ):
        assert FORBIDDEN.search(text), text
    assert len(OWN) > 10


def test_no_code_of_the_dashboard_trusts_text() -> None:
    for path in DASHBOARD.rglob("*.py"):
        assert "Markup" not in path.read_text(), path


def test_no_test_turns_the_policy_of_pages_off() -> None:
    """A browser that is told to bypass it sees no violation of it, and every other test of the folder would be blind."""
    off = re.compile("bypass" + "_csp|bypass" + "CSP|disable-web" + "-security|setBypass" + "CSP")
    files = sorted(Path(__file__).parent.rglob("*.py")) + sorted((ROOT / "bench").rglob("*.py"))
    assert len(files) > 30
    assert [path.name for path in files if off.search(path.read_text())] == []
