"""Write every generated page of the docs, then check the navigation: ``python -m cli.pages`` in the repository."""

import sys
from pathlib import Path

from cli.pages import navigation
from cli.pages.reference import PAGES


def main(root: Path) -> int:
    """Write the pages below ``root``; return 1 when the navigation and the folder differ, else 0."""
    for name, render in PAGES.items():
        page = root / "docs" / "reference" / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render())
    found = navigation.problems(root)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
