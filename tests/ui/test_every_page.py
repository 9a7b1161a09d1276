"""Every page that the routes name is accessible and works by keyboard: also answers to forms, errors, and the pages of a look.

A page that is added is looked at without being named here; one that no link leads to fails.
"""

import re
from contextlib import closing

from playwright.sync_api import expect

from bench.screenshots.pages import operator_pages, tenant_pages
from tests.api.audited_pages import OPERATORS, OPERATORS_UNAUDITED, TENANTS, TENANTS_UNAUDITED
from tests.e2e.conftest import BASE_NAME, make_key, make_tenant
from tests.e2e.raw_client import RawClient
from tests.ui.conftest import UiService, UiTenant
from tests.ui.every_page import Inspection, filled_forms, made_up
from tests.ui.test_operators import id_of

FOR_SCRIPTS = {"/ui/policy-reports", "/ops/policy-reports", "/ui/playground/stream"}
"""Addresses that scripts and browsers send to by themselves, which answer with no page."""
ERRORS = [str(status) for status in (400, 401, 403, 404, 409, 412, 422, 429)]


def make_one(service: UiService, name: str) -> tuple[UiTenant, dict[str, str]]:
    """Make a tenant with a run, two checkpoints and a second key; return it with their ids."""
    key = make_tenant(service.data, name)
    admin = make_key(service.data, name, role="admin")
    make_key(service.data, name, role="viewer")
    with closing(RawClient(service.url, admin)) as client:
        session = client.session()
        run = client.model(BASE_NAME, session)
        for seq_id, kind, path in ((1, "save_weights", "one"), (2, "save_weights_for_sampler", "two")):
            client.result(client.post(f"/{kind}", model_id=run, seq_id=seq_id, path=path))
    ids = {"run_id": run, "session_id": session, "segment": "weights", "name": "one", "key": key}
    return UiTenant(name, service.data, admin, {"admin": admin}), ids


def test_every_page_of_a_tenant_is_accessible_and_reached_by_keyboard(
    browse, watched, ui_service, speakers, cat
) -> None:
    webhook = f"{ui_service.url}/api/weft/v1/webhooks/looked-at"
    cat.client.http.put(webhook, json={"url": "https://bell.example/", "events": ["*"]}).raise_for_status()
    cat.client.model(BASE_NAME)
    cat.stream(tokens=4).finish()
    page = browse(ui_service.cats)
    watched[0].expected += ERRORS
    inspection = Inspection(page)
    inspection.walk(tenant_pages())
    assert len(inspection.seen) > 20
    for template in list(inspection.seen):
        page.goto(made_up(template))
        inspection.look()
    page.goto("/ui/audit?action=no-such-action")
    inspection.look()
    # Nobody has looked at another tenant's things meanwhile.
    assert not [place for place in inspection.seen.values() if speakers[1].run in place]
    # The tenant's list is empty again for the tests that follow.
    cat.client.http.delete(webhook).raise_for_status()


def test_every_answer_to_a_tenants_form_is_accessible_and_reached_by_keyboard(browse, watched, ui_service) -> None:
    """Each form with nothing in it, of things that are not there; and each as it is meant, with what it asks before."""
    moths, ids = make_one(ui_service, "moths")
    page, beside = browse(moths), browse(ui_service.dogs)
    watched[0].expected += ERRORS
    inspection = Inspection(page)
    paths = [one.path for one in TENANTS if not one.path.endswith("logout")] + list(TENANTS_UNAUDITED)
    for path in paths:
        if path not in FOR_SCRIPTS:
            inspection.send(made_up(path), {})
    page.goto("/ui/keys")
    ids["number"] = str(page.locator("tr[data-key]").nth(2).get_attribute("data-key"))
    inspection.send("/ui/checkpoints/delete", {f"tick:tinker://{ids['run_id']}/weights/one": "on"})
    expect(page.get_by_role("heading")).to_contain_text("Delete")
    for path, fields in filled_forms(TENANTS, ids):
        if path == "/ui/webhooks":
            ids["name"] = "bell"
        inspection.send(path, fields)
    expect(page.get_by_label("API key")).to_be_visible()
    beside.goto("/ui/keys")
    expect(beside.get_by_role("heading", name="Keys")).to_be_visible()


def test_every_page_of_operators_is_accessible_and_reached_by_keyboard(operate, watched, ui_service, speakers) -> None:
    page = operate()
    watched[0].expected += ERRORS
    inspection = Inspection(page)
    inspection.walk(operator_pages())
    assert len(inspection.seen) > 12
    for template in list(inspection.seen):
        page.goto(made_up(template))
        inspection.look()
    page.goto("/ops/audit?action=no-such-action")
    inspection.look()


def test_every_answer_to_an_operators_form_is_accessible_and_reached_by_keyboard(
    browse, operate, watched, ui_service
) -> None:
    moths, ids = make_one(ui_service, "mayflies")
    ids |= {"tenant_id": id_of(ui_service, moths), "key": ui_service.operator_key}
    page, beside = operate(), browse(ui_service.dogs)
    watched[0].expected += ERRORS
    inspection = Inspection(page)
    for path in [one.path for one in OPERATORS if not one.path.endswith("logout")] + list(OPERATORS_UNAUDITED):
        if path not in FOR_SCRIPTS:
            inspection.send(made_up(path), {})
    inspection.send("/ops/housekeeping/run", {"step": "expire-links"})
    page.goto("/ops/processes")
    trainer = page.locator("[aria-labelledby=trainers] tr[data-process]").first
    ids["trainer_id"] = str(trainer.get_attribute("data-process"))
    for path, fields in filled_forms(OPERATORS, ids):
        inspection.send(path, fields)
        if path == "/ops/replicas/directive":
            inspection.send(path, {**fields, "directive": "work"})
    expect(page.get_by_label("Operator's key")).to_be_visible()
    beside.goto("/ui/keys")
    expect(beside.get_by_role("heading", name="Keys")).to_be_visible()


def test_pages_of_a_look_are_accessible(operate, ui_service) -> None:
    page = operate()
    inspection = Inspection(page)
    inspection.send(f"/ops/tenants/{id_of(ui_service, ui_service.cats)}/look", {"reason": "ticket 9"})
    page.goto(ui_service.url + page.locator("pre").inner_text().strip())
    page.wait_for_url(re.compile(r"/ui$"))
    expect(page.get_by_role("note")).to_contain_text("as the operator")
    inspection.look()
