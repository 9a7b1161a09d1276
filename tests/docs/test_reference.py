"""The reference pages are those that the code renders now."""

import pytest

from cli.pages.reference import PAGES
from tests.conftest import ROOT


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_generated_page_is_current(name: str) -> None:
    page = ROOT / "docs" / "reference" / name
    assert page.read_text() == PAGES[name](), "run: .venv/bin/python -m cli.pages"
