"""The generated pages are true to the code."""

from cli.settings_page import render
from tests.conftest import ROOT


def test_configuration_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "configuration.md"
    assert page.read_text() == render(), "run: .venv/bin/python -m cli.settings_page"
