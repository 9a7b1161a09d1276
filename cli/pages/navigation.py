"""Check of the site's navigation against the pages in the folder. The site's builder has no such check."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIGURATION = Path("zensical.toml")
PAGES = Path("docs")


def problems(root: Path) -> list[str]:
    """Return a line for each page that the navigation of ``root`` does not list, lists twice, or lists although it is missing."""
    navigation = tomllib.loads((root / CONFIGURATION).read_text())["project"]["nav"]
    listed = list(_pages(navigation))
    there = {str(page.relative_to(root / PAGES)) for page in (root / PAGES).rglob("*.md")}
    return [
        *(f"{page} is not in the navigation of {CONFIGURATION}" for page in sorted(there - set(listed))),
        *(
            f"{page} is in the navigation of {CONFIGURATION} and not in {PAGES}/"
            for page in sorted(set(listed) - there)
        ),
        *(
            f"{page} is in the navigation of {CONFIGURATION} twice"
            for page in sorted(set(listed))
            if listed.count(page) > 1
        ),
    ]


def _pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from _pages(part)
