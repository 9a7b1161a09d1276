"""Pages of the navigation: they open, are accessible to a viewer too, and show no more than the role may do."""

from playwright.sync_api import Page, expect

from tests.ui.browser import SECONDS, expect_ended


def _paths(page: Page) -> list[str]:
    links = page.get_by_role("navigation", name="Pages").get_by_role("link")
    return [str(link.get_attribute("href")) for link in links.all()]


def test_every_page_of_a_viewers_navigation_opens_and_is_accessible(browse, axe, ui_service) -> None:
    """Pages as those see them who may do less than an admin, whose pages ``test_every_page`` looks at."""
    page = browse(ui_service.cats, role="viewer")
    paths = _paths(page)
    assert len(paths) >= 4
    for path in paths:
        page.goto(path)
        expect(page.locator("h1")).to_have_count(1)
        expect(page.locator("nav a[aria-current=page]")).to_have_count(1)
        expect(page.locator("th:empty")).to_have_count(0)
        axe(page)


def test_a_viewer_sees_no_keys_and_is_refused_by_hand(browse, watched, ui_service) -> None:
    page = browse(ui_service.cats, role="viewer")
    watched[0].expected.append("403")
    assert not {"/ui/keys", "/ui/audit", "/ui/webhooks"} & set(_paths(page))
    for path in ("/ui/keys", "/ui/audit", "/ui/webhooks"):
        page.goto(path)
        expect(page.get_by_text("this needs the scope")).to_be_visible()
    status = page.evaluate(
        "() => fetch('/ui/keys', {method: 'POST', body: new URLSearchParams({role: 'viewer'})}).then(a => a.status)"
    )
    assert status == 403


def test_a_key_is_shown_once_and_ends_with_its_sessions(browse, ui_service, watched) -> None:
    page = browse(ui_service.cats)
    page.goto("/ui/keys")
    page.get_by_label("Note").fill("<img src=x onerror=alert(1)>")
    page.get_by_role("button", name="Make the key").click()
    secret = page.locator("#secret").inner_text()
    assert secret.startswith("tml-")
    expect(page.get_by_role("cell", name="<img src=x onerror=alert(1)>")).to_be_visible()
    other = browse(None)
    other.goto("/ui/login")
    other.get_by_label("API key").fill(secret)
    other.get_by_role("button", name="Log in").click()
    expect(other.get_by_role("heading", name="Overview")).to_be_visible()
    # The other page may ask for news just after its session ended.
    watched[-1].expected += ["401"]
    prefix = secret[:16]
    page.goto("/ui/keys")
    assert secret not in page.content()
    page.locator("tr", has_text=prefix).get_by_text("Revoke…").click()
    page.get_by_role("button", name=f"Revoke {prefix}").click()
    expect(page.locator("tr", has_text=prefix)).to_contain_text("revoked")
    expect_ended(other, "/ui")


def test_a_project_and_its_entry_in_the_audit_log(browse, ui_service) -> None:
    page = browse(ui_service.cats)
    page.goto("/ui/projects")
    page.get_by_label("Name").fill("whiskers")
    page.get_by_role("button", name="Make the project").click()
    expect(page.get_by_role("cell", name="whiskers")).to_be_visible()
    page.goto("/ui/audit?action=project_create")
    row = page.get_by_role("row").nth(1)
    expect(row).to_contain_text("project create")
    expect(row).to_contain_text("ui")


def test_pages_work_without_scripts(browse, ui_service) -> None:
    page = browse(ui_service.dogs, java_script_enabled=False)
    page.goto("/ui/projects")
    page.get_by_label("Name").fill("bones")
    page.get_by_role("button", name="Make the project").click()
    expect(page.get_by_role("cell", name="bones")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("API key")).to_be_visible()


def test_what_the_policy_keeps_from_a_page_is_in_the_security_log(browse, watched, ui_service) -> None:
    page = browse(ui_service.cats)
    watched[0].expected += ["policy violated: img-src", "evil.example"]
    page.goto("/ui/projects")
    page.evaluate("() => { new Image().src = 'http://evil.example/stolen.png'; }")
    written = "img-src blocked http://evil.example on /ui/projects"
    for _ in range(int(SECONDS) * 10):
        if written in ui_service.process.log_tail(10**6):
            break
        page.wait_for_timeout(100)
    assert written in ui_service.process.log_tail(10**6)
