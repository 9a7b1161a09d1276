"""The pages: short, listed, true to the repository's paths, and free of other origins once built."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from cli.main import app
from cli.pages import navigation
from store.settings import Settings
from tests.conftest import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
MOST_LINES = 200
SETTINGS = {f"WEFT_{name.upper()}" for name in Settings.model_fields} | {
    "WEFT_CONFIG",
    "WEFT_TEST_POSTGRES",
    "WEFT_ADMIN_URL",
    "WEFT_ADMIN_KEY",
}
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


def weft_commands(text: str) -> Iterator[list[str]]:
    """Yield the words behind ``weft`` of each command in the page's shell blocks."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if "weft " in line else []
            ends = [number for number, word in enumerate(words) if word in ("|", ">", "&&", ";", "&")]
            for start, end in zip([-1, *ends], [*ends, len(words)], strict=True):
                named = list(dropwhile(re.compile(r"[A-Z_]+=").match, words[start + 1 : end]))
                if named and Path(named[0]).name == "weft":
                    yield named[1:]


def parse(words: list[str]) -> None:
    """Read the words as ``weft`` does, without running anything. Raises ``KeyError`` or typer's error of wrong usage."""
    command: Any = typer.main.get_command(app)
    while isinstance(command, TyperGroup):
        context = command.make_context("weft", words)
        name, *words = [*context._protected_args, *context.args]
        command = command.commands[name]
    command.make_context("weft", words)


@pytest.mark.parametrize("page", TEXTS, ids=_name)
def test_every_weft_command_of_a_shell_block_is_read_as_it_is_printed(page: Path) -> None:
    for words in weft_commands(page.read_text()):
        if page.parent.name not in PAST and not {"--install-completion", "--help"} & {*words}:
            parse(words)


@pytest.mark.parametrize("line", ["weft tenant sett cats", "weft tenant set cats --shares 2", "weft run weigh one x y"])
def test_a_command_that_is_printed_wrongly_is_found(line: str) -> None:
    (words,) = weft_commands(f"```sh\nA=1 true | B=2 .venv/bin/{line} # says\n```")
    with pytest.raises((KeyError, typer.BadParameter.__mro__[1])):
        parse(words)


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
