"""Keyboard: a login, a form and a dangerous button by keys alone. ``test_every_page`` goes through all pages by tab."""

from playwright.sync_api import expect


def test_a_login_a_form_and_a_dangerous_button_work_without_a_mouse(browse, ui_service) -> None:
    page = browse(None)
    page.goto("/ui/login")
    page.get_by_label("API key").focus()
    page.keyboard.type(ui_service.cats.key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.goto("/ui/keys")
    page.get_by_label("Note").focus()
    page.keyboard.type("by keyboard")
    page.keyboard.press("Enter")
    prefix = page.locator("#secret").inner_text()[:16]
    page.goto("/ui/keys")
    row = page.locator("tr", has_text=prefix)
    row.get_by_text("Revoke…").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name=f"Revoke {prefix}")).to_be_focused()
    page.keyboard.press("Enter")
    expect(row).to_contain_text("revoked")
    other = browse(ui_service.dogs)
    other.goto("/ui/keys")
    assert prefix not in other.content()
