"""Every page of a tenant says whose it is: beside the menu, in the window's title, and in the line above an operator's look."""

import re

from playwright.sync_api import expect

from tests.e2e.conftest import make_tenant
from tests.ui.browser import log_in
from tests.ui.test_operators import id_of

ODD = "Pfoten & <b>Söhne</b> \u202eHbmG"
SHOWN = "Pfoten & <b>Söhne</b> ⟨U+202E⟩HbmG"


def test_each_tenants_pages_name_it_and_no_other(browse, watched, ui_service) -> None:
    pages = {one.name: browse(one) for one in (ui_service.cats, ui_service.dogs)}
    for one in watched:
        one.expected.append("404")
    for name, page in pages.items():
        for path, title in (("/ui", "Overview"), ("/ui/runs", "Runs"), ("/ui/runs/none", "Not here")):
            page.goto(path)
            expect(page).to_have_title(f"{title} · {name} · weft")
            expect(page.locator(".side .whose")).to_have_text(f"Tenant {name}")
    assert "dogs" not in pages["cats"].content()


def test_a_hostile_name_is_a_text_and_fits(browse, axe, ui_service) -> None:
    key = make_tenant(ui_service.data, ODD * 3)
    for options in ({}, {"viewport": {"width": 390, "height": 800}}):
        page = browse(None, **options)
        log_in(page, key)
        expect(page.locator(".side .whose")).to_contain_text(SHOWN)
        expect(page.locator(".side .whose b")).to_have_count(0)
        assert SHOWN in page.title()
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        axe(page)


def test_a_look_names_the_tenant_that_is_looked_at(operate, ui_service) -> None:
    for tenant in (ui_service.cats, ui_service.dogs):
        page = operate()
        page.goto(f"/ops/tenants/{id_of(ui_service, tenant)}")
        expect(page).to_have_title(f"{tenant.name} · weft")
        page.get_by_label("Reason, which the tenant reads").fill("ticket 8")
        page.get_by_role("button", name="Begin a look").click()
        page.goto(ui_service.url + page.locator("pre").inner_text().strip())
        page.wait_for_url(re.compile(r"/ui$"))
        expect(page.get_by_role("note")).to_contain_text(f"You look at the tenant {tenant.name} as the operator")
