"""Filters of templates: values as people read them."""

import pytest

from api.dashboard.rendering import browser, noun, short_id, told

CHROME = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/156.0.0.0 Safari/537.36"
SAFARI = "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/18.2 Safari/605.1.15"


@pytest.mark.parametrize(
    ("agent", "named"),
    [
        (CHROME, "Chrome 156 on Linux"),
        (f"{CHROME} Edg/155.0", "Edge 155 on Linux"),
        (SAFARI, "Safari 18 on macOS"),
        ("Mozilla/5.0 (Windows NT 10.0; rv:140.0) Gecko/20100101 Firefox/140.0", "Firefox 140 on Windows"),
        ("python-httpx/0.28.1", "python-httpx/0.28.1"),
        ("", ""),
    ],
)
def test_a_browser_is_named_and_anything_else_told_as_it_is(agent: str, named: str) -> None:
    assert browser(agent) == named


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("2026-11-25T09:10:47.313018+00:00", "2026-11-25 09:10:47 UTC"),
        ("2026-11-25", "2026-11-25"),
        (["a", "b"], "a, b"),
        ([], "none"),
        (True, "yes"),
        (None, "–"),
        (853779, "853779"),
    ],
)
def test_a_value_of_an_entry_is_told_as_text(value: object, text: str) -> None:
    assert told(value) == text


def test_one_is_told_as_one_and_none_as_many() -> None:
    assert [noun(number, "pass", "passes") for number in (0, 1, 2)] == ["passes", "pass", "passes"]
    assert [noun(number, "point") for number in (0, 1, 2)] == ["points", "point", "points"]


def test_a_long_id_is_told_by_its_beginning_and_its_end() -> None:
    assert short_id("16ed3bf722f01a000fad778924d517bc:train:0") == "16ed3bf7…train:0"
    assert short_id("4bc84ec8-1cb1-45d1-b7fe-ed14233baf79") == "4bc84ec8…3baf79"
    assert short_id("short") == "short"
