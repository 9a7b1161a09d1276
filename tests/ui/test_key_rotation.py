"""A key is rotated by the page: the new secret is shown once, and the old key works until its grace ends."""

from datetime import timedelta
from pathlib import Path

import httpx
from playwright.sync_api import Locator, Page, expect
from sqlalchemy import update

from store.clock import utc_now
from store.database import Database
from store.tables import ApiKey
from tests.e2e.conftest import make_key
from tests.ui.stored import write_rows


def status(url: str, key: str) -> int:
    """Return the status that the API answers a read by the key with."""
    return httpx.get(f"{url}/api/weft/v1/runs", headers={"X-API-Key": key}, timeout=40).status_code


def end_grace(data: Path, prefix: str) -> None:
    """Have a key's grace be over."""

    async def write(database: Database) -> None:
        async with database.write() as transaction:
            ended = utc_now() - timedelta(seconds=1)
            await transaction.execute(update(ApiKey).where(ApiKey.prefix == prefix).values(expires_at=ended))

    write_rows(data, write)


def row_of(page: Page, prefix: str) -> Locator:
    return page.locator("tr", has=page.get_by_text(prefix, exact=True))


def test_a_rotated_keys_secret_is_shown_once_and_the_old_one_works_until_its_grace_ends(
    browse, axe, ui_service
) -> None:
    url = ui_service.url
    old = make_key(ui_service.data, "cats", role="member")
    theirs = make_key(ui_service.data, "dogs", role="member")
    prefix = old[:16]
    page, beside = browse(ui_service.cats), browse(ui_service.dogs)
    page.goto("/ui/keys")
    assert theirs[:16] not in page.content()
    expect(row_of(page, prefix)).not_to_contain_text("ends")
    page.get_by_role("button", name=f"Rotate {prefix}").click()
    new = page.locator("#secret").inner_text()
    assert new.startswith("tml-")
    assert new[:16] != prefix
    axe(page)
    expect(row_of(page, prefix)).to_contain_text("live")
    expect(row_of(page, prefix)).to_contain_text("ends in")
    expect(row_of(page, new[:16])).to_contain_text("member")
    assert [status(url, one) for one in (old, new, theirs)] == [200, 200, 200]
    page.goto("/ui/keys")
    for content in (page.content(), page.request.get("/ui/keys").text()):
        assert new not in content
    expect(page.locator("tr", has_text="live").filter(has_text=new[:16])).to_have_count(1)
    end_grace(ui_service.data, prefix)
    assert [status(url, one) for one in (old, new, theirs)] == [401, 200, 200]
    page.reload()
    expect(row_of(page, prefix)).to_contain_text("expired")
    expect(page.get_by_role("button", name=f"Rotate {prefix}")).to_have_count(0)
    beside.goto("/ui/keys")
    assert new[:16] not in beside.content()
    expect(row_of(beside, theirs[:16])).not_to_contain_text("ends")
