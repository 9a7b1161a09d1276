"""Buttons that copy what people carry elsewhere."""

from playwright.sync_api import Page, expect

READ = "() => navigator.clipboard.readText()"


def made_key(page: Page) -> str:
    """Make a key by the page's form, and return its secret."""
    page.goto("/ui/keys")
    page.get_by_label("Note").fill("copied")
    page.get_by_role("button", name="Make the key").click()
    return page.locator("#secret").inner_text()


def test_a_secret_and_an_id_are_copied_whole_and_the_button_says_so(browse, axe, ui_service, speakers) -> None:
    page = browse(ui_service.cats, permissions=["clipboard-read", "clipboard-write"])
    secret = made_key(page)
    page.get_by_role("button", name="Copy the key").click()
    expect(page.get_by_role("button", name="Copied the key")).to_have_text("Copied")
    expect(page.get_by_text("Copied the key")).to_have_role("status")
    assert page.evaluate(READ) == secret
    axe(page)
    run = speakers[0].run
    page.goto(f"/ui/runs/{run}")
    page.get_by_role("button", name="Copy the run's id").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Copied the run's id")).to_be_focused()
    assert page.evaluate(READ) == run
    expect(page.get_by_role("button", name="Copy the run's id")).to_have_text("Copy")


def test_a_clipboard_that_refuses_is_told_and_none_has_no_button(browse, ui_service) -> None:
    page = browse(ui_service.cats)
    page.add_init_script("navigator.clipboard.writeText = () => Promise.reject(new Error('no'));")
    made_key(page)
    page.get_by_role("button", name="Copy the key").click()
    expect(page.get_by_role("button", name="Not copied the key")).to_have_text("Not copied")
    without = browse(ui_service.dogs)
    without.add_init_script("Object.defineProperty(Navigator.prototype, 'clipboard', {value: undefined});")
    assert made_key(without).startswith("tml-")
    expect(without.get_by_role("button", name="Copy the key")).to_have_count(0)
