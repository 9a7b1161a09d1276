"""Nothing that is stored grows for ever: each table and each folder names its end."""

import pytest

from store.tables import Base
from tests.conftest import ROOT
from workers.housekeeping.retention import RETENTION_OF_FOLDERS, RETENTION_OF_TABLES

PAGE = (ROOT / "docs" / "explanation" / "retention.md").read_text()


def test_every_table_names_its_end() -> None:
    """A new table gets a line in ``workers/housekeeping/retention.py``, and one on the page."""
    assert set(RETENTION_OF_TABLES) == set(Base.metadata.tables)


@pytest.mark.parametrize("name", [*RETENTION_OF_TABLES, *(f"{folder}/" for folder in RETENTION_OF_FOLDERS)])
def test_the_page_says_how_long_it_is_kept(name: str) -> None:
    assert f"`{name}`" in PAGE
