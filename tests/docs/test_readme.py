"""README's picture shows every package as a box, and its quick start is that of the tutorial."""

import re
import subprocess

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def _folders() -> set[str]:
    tracked = subprocess.run(["git", "ls-files", "*/*"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    return {line.partition("/")[0] for line in tracked.splitlines() if not line.startswith(".")}


def test_the_picture_shows_every_folder() -> None:
    (picture,) = re.findall(r"```text\n(┌.*?)```", README, re.DOTALL)
    boxes = re.findall(r"│ ([a-z]+)/ ", picture)
    assert sorted(boxes) == sorted(_folders())


def test_the_picture_s_lines_are_equally_long() -> None:
    (picture,) = re.findall(r"```text\n(┌.*?)```", README, re.DOTALL)
    assert len({len(line) for line in picture.splitlines()}) == 1


def test_the_quick_start_is_the_tutorial_s_program() -> None:
    tutorial = (ROOT / "docs" / "tutorials" / "first-run.md").read_text()
    first_program = re.compile(r"```python\n(.*?)```", re.DOTALL)
    assert first_program.findall(README)[0] == first_program.findall(tutorial)[0]
