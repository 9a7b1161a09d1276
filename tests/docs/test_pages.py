"""The pages: short, listed, true to the repository's paths, and free of other origins once built."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cli.main import app
from cli.pages import navigation
from store.settings import Settings
from tests.conftest import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
MOST_LINES = 200
SETTINGS = {f"WEFT_{name.upper()}" for name in Settings.model_fields} | {"WEFT_CONFIG", "WEFT_TEST_POSTGRES"}
PAST = ("decisions", "measurements")
"""Folders of pages that tell of a moment, and may name what has gone."""
FLOORS = (
    "api|bench|cli|contracts|docs|engine|examples|ledger|migrations|store|telemetry|tenants|testing|tests|workers|\\.ci"
)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", TEXTS, ids=_name)
def test_a_page_is_short_and_has_one_title(page: Path) -> None:
    lines = page.read_text().splitlines()
    # A generated page is looked up, not read.
    assert len(lines) <= MOST_LINES or any(line.startswith("*Generated from") for line in lines[:5])
    fences = [i for i, line in enumerate(lines) if line.lstrip().startswith("```")]
    inside = {i for start, end in zip(fences[::2], fences[1::2], strict=True) for i in range(start, end)}
    assert [i for i, line in enumerate(lines) if line.startswith("# ") and i not in inside] == [0]


def test_every_page_is_in_the_navigation() -> None:
    assert navigation.problems(ROOT) == []


def test_the_navigation_s_faults_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    (tmp_path / "zensical.toml").write_text('[project]\nnav = ["gone.md", { "a" = ["twice.md", "twice.md"] }]\n')
    found = "\n".join(navigation.problems(tmp_path))
    assert all(name in found for name in ("lost.md is not", "gone.md is in", "twice.md is in"))
    assert "twice.md is in the navigation of zensical.toml twice" in found


@pytest.mark.parametrize("page", TEXTS, ids=_name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    """Pages of the site are checked by its builder, too; README and CONTRIBUTING are not."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", [page for page in TEXTS if page.parent.name not in PAST], ids=_name)
def test_every_path_that_is_named_exists(page: Path) -> None:
    named = re.findall(rf"`((?:{FLOORS})/[\w./-]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", TEXTS, ids=_name)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    named = set(re.findall(r"\bWEFT_[A-Z_]+[A-Z]\b", page.read_text()))
    assert named - SETTINGS == set()


@pytest.mark.parametrize("page", TEXTS, ids=_name)
def test_every_weft_command_that_is_named_exists(page: Path) -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    text = page.read_text()
    shell = re.sub(r"\s#.*", "", "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)))
    named = re.findall(r"(?<![\w/.-])(?:\.venv/bin/)?weft ([a-z]+)\b", shell)
    named += re.findall(r"`(?:\.venv/bin/)?weft ([a-z]+)\b", text)
    assert set(named) - known == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly from a copy: a broken link or anchor fails."""
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", root / "docs")
    shutil.copy(ROOT / "zensical.toml", root)
    builder = Path(sys.executable).with_name("zensical")
    built = subprocess.run([builder, "build", "--clean", "--strict"], capture_output=True, text=True, cwd=root)
    assert built.returncode == 0, built.stdout + built.stderr
    return root / "build" / "site"


def test_the_site_has_every_page(site: Path) -> None:
    expected = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in PAGES}
    assert expected <= {str(page.relative_to(site)) for page in site.rglob("*.html")}


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe)[^>]+src=\"?(https?:)?//|<link[^>]+href=\"?(https?:)?//", re.IGNORECASE)
    pages = list(site.rglob("*.html"))
    assert pages
    assert [page.name for page in pages if loads.search(page.read_text())] == []
    styles = "".join(sheet.read_text() for sheet in site.rglob("*.css"))
    assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", styles)
