"""Operators' pages in a browser: the service at a glance, and changes by forms that the admin API would make."""

import json
import re
from importlib.metadata import version

import httpx
from playwright.sync_api import expect

from testing.operator_command import weft
from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient, pass_message
from tests.ui.conftest import UiService, UiTenant

PAGES = (
    "overview",
    "tenants",
    "queue",
    "replicas",
    "processes",
    "runs",
    "sessions",
    "audit",
    "browsers",
    "housekeeping",
)


def id_of(service: UiService, tenant: UiTenant) -> str:
    found: str = json.loads(weft(service.data, "tenant", "show", tenant.name, "--json"))["id"]
    return found


def entries(service: UiService, tenant: UiTenant, action: str) -> list[dict[str, object]]:
    told = weft(service.data, "audit", "list", "--tenant", tenant.name, "--action", action, "--json")
    found: list[dict[str, object]] = json.loads(told)["items"]
    return found


def test_pages_below_a_list_lead_back_to_it(operate, ui_service, speakers) -> None:
    page = operate()
    for path, title in (
        (f"tenants/{id_of(ui_service, ui_service.cats)}", "Tenants"),
        (f"runs/{speakers[1].run}", "Runs"),
    ):
        page.goto(f"/ops/{path}")
        page.locator(".crumb").get_by_role("link", name=title).click()
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()


def test_a_drain_looks_alike_wherever_it_is(operate, ui_service) -> None:
    page, looks = operate(), set()
    for path in ("replicas", "processes"):
        page.goto(f"/ops/{path}")
        button = page.get_by_role("button", name="Drain", exact=True).first
        looks.add(button.evaluate("one => [getComputedStyle(one).color, getComputedStyle(one).backgroundColor].join()"))
    assert len(looks) == 1


def test_a_replica_is_drained_by_a_button_and_works_again(operate, ui_service) -> None:
    page = operate()
    page.goto("/ops/replicas")
    page.get_by_label("Base model").select_option(BASE_NAME)
    page.get_by_label("Replica", exact=True).fill("spare-0")
    page.get_by_label("Reason").fill("new driver")
    page.get_by_role("button", name="Drain").click()
    row = page.locator('tr[data-replica="spare-0"]')
    expect(row).to_contain_text("draining")
    expect(row).to_contain_text("new driver")
    assert "directed, not seen" in weft(ui_service.data, "replica", "list")
    told = json.loads(weft(ui_service.data, "audit", "list", "--action", "replica_direct", "--json"))["items"][0]
    assert (told["door"], told["after"]["reason"], told["actor"]) == ("ui", "new driver", ui_service.operator_key[:16])
    page.get_by_label("Base model").select_option(BASE_NAME)
    page.get_by_label("Replica", exact=True).fill("spare-0")
    page.get_by_role("button", name="Work").click()
    expect(row).to_have_count(0)


def test_a_trainers_last_pass_is_on_the_page_without_a_reload(operate, ui_service, speakers) -> None:
    page = operate()
    page.goto("/ops/processes")
    row = page.locator("[aria-labelledby=trainers] tr[data-process]", has_text=BASE_NAME)
    client = RawClient(ui_service.url, ui_service.dogs.key)
    try:
        run = client.model(BASE_NAME)
        client.result(client.passes(pass_message(run, 1, list(range(1, 98)))))
    finally:
        client.close()
    expect(row).to_contain_text("97 tokens of 1 tenant")
    expect(row).to_contain_text("% padding")
    expect(row).to_contain_text(f"weft {version('weft')}")


def test_a_tenant_is_limited_and_suspended_while_another_goes_on(operate, ui_service) -> None:
    page, dogs = operate(), ui_service.dogs
    page.goto(f"/ops/tenants/{id_of(ui_service, dogs)}")
    page.get_by_text("Share, class and limits").click()
    page.get_by_label("Share", exact=True).fill("2.5")
    page.get_by_label("sessions", exact=True).fill("777")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("dl.facts")).to_contain_text("2.5")
    assert "sessions\t777\town" in weft(ui_service.data, "tenant", "limits", "dogs")
    page.get_by_label("Mode").select_option("blocked")
    page.get_by_label("Reason, which its clients read").fill("unpaid bill")
    page.get_by_role("button", name="Suspend").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert ask(ui_service, dogs) == 403
    assert ask(ui_service, ui_service.cats) == 200
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("button", name="Suspend")).to_be_visible()
    assert ask(ui_service, dogs) == 200
    assert [one["door"] for one in entries(ui_service, dogs, "tenant_suspend")] == ["ui"]
    assert entries(ui_service, ui_service.cats, "tenant_suspend") == []


def ask(service: UiService, tenant: UiTenant) -> int:
    headers = {"X-API-Key": tenant.key}
    return httpx.get(f"{service.url}/api/v1/sessions", headers=headers, timeout=40).status_code


def test_a_form_of_an_older_state_is_refused_in_words(operate, watched, ui_service) -> None:
    first, second = operate(), operate()
    watched[0].expected.append("412")
    path = f"/ops/tenants/{id_of(ui_service, ui_service.cats)}"
    for page in (first, second):
        page.goto(path)
    second.get_by_text("Share, class and limits").click()
    second.get_by_label("Share", exact=True).fill("3")
    second.get_by_role("button", name="Save").click()
    expect(second.locator("dl.facts")).to_contain_text("3, class")
    first.get_by_label("Reason, which its clients read").fill("too much")
    first.get_by_role("button", name="Suspend").click()
    expect(first.get_by_role("alert")).to_contain_text("somebody has changed this")
    assert json.loads(weft(ui_service.data, "tenant", "show", "cats", "--json"))["suspension"] is None
    expect(first.locator("dl.facts")).to_contain_text("3, class")


def test_a_look_shows_a_tenants_pages_and_changes_nothing(operate, watched, ui_service) -> None:
    page, cats = operate(), ui_service.cats
    page.goto(f"/ops/tenants/{id_of(ui_service, cats)}")
    page.get_by_label("Reason, which the tenant reads").fill("ticket 7")
    page.get_by_role("button", name="Begin a look").click()
    fragment = page.locator("pre").inner_text().strip()
    assert "code=" not in page.url
    page.goto(f"{ui_service.url}{fragment}")
    page.wait_for_url(re.compile(r"/ui$"))
    expect(page.get_by_role("note")).to_contain_text("as the operator")
    watched[0].expected.append("403")
    refused = page.evaluate(
        "async () => (await fetch('/ui/sessions/1/end', {method: 'POST', body: new URLSearchParams()})).status"
    )
    assert refused == 403
    told = entries(ui_service, cats, "tenant_look")[0]
    assert (told["after"], told["role"]) == ({"reason": "ticket 7", "minutes": 15}, "operator")
    assert entries(ui_service, ui_service.dogs, "tenant_look") == []
    # The code was used up.
    page.context.clear_cookies()
    watched[0].expected.append("401")
    page.goto(f"{ui_service.url}{fragment}")
    expect(page.get_by_role("alert")).to_be_visible()


def test_one_sides_cookie_opens_nothing_on_the_other(operate, browse, ui_service) -> None:
    operator, tenant = operate(), browse(ui_service.cats)
    (ours,) = operator.context.cookies()
    (theirs,) = tenant.context.cookies()
    assert (ours["name"], ours["secure"], ours["httpOnly"]) == ("__Host-weft-ops", True, True)
    for name, value in ((ours["name"], theirs["value"]), (theirs["name"], theirs["value"])):
        cookie = {"Cookie": f"{name}={value}"}
        answer = httpx.get(f"{ui_service.ops_url}/ops/overview", headers=cookie, timeout=40)
        assert (answer.status_code, answer.headers["location"]) == (303, "/ops/login")
    for name in (ours["name"], theirs["name"]):
        answer = httpx.get(f"{ui_service.url}/ui", headers={"Cookie": f"{name}={ours['value']}"}, timeout=40)
        assert answer.headers["location"].startswith("/ui/login")
    for path in ("/ops", "/ops/overview", "/ops/login", "/admin/v1/tenants"):
        assert httpx.get(f"{ui_service.url}{path}", timeout=40).status_code == 404
    assert httpx.get(f"{ui_service.ops_url}/ui", timeout=40).status_code == 404


def test_forms_work_without_scripts(operate, ui_service) -> None:
    page = operate(java_script_enabled=False)
    for name in PAGES:
        assert page.goto(f"/ops/{name}").status == 200
    page.goto(f"/ops/tenants/{id_of(ui_service, ui_service.cats)}")
    page.get_by_label("Tokens, or money; empty takes the budget away").fill("5000000")
    page.get_by_role("button", name="Set the budget").click()
    expect(page.get_by_text("5 000 000".replace(" ", "\N{NARROW NO-BREAK SPACE}"))).to_be_visible()
    page.goto("/ops/housekeeping")
    page.get_by_role("button", name="Run expire-links").click()
    expect(page.get_by_role("status")).to_contain_text("expire-links")


def test_a_forged_form_is_refused_and_a_wrong_key_is_told_alike(chromium, ui_service) -> None:
    forged = httpx.post(
        f"{ui_service.ops_url}/ops/login",
        data={"key": ui_service.operator_key},
        headers={"Sec-Fetch-Site": "cross-site"},
        timeout=40,
    )
    assert forged.status_code == 403
    own = {"Sec-Fetch-Site": "same-origin"}
    texts = set()
    for wrong in ("nonsense", ui_service.cats.key, ui_service.operator_key[:-1] + "?"):
        answer = httpx.post(f"{ui_service.ops_url}/ops/login", data={"key": wrong}, headers=own, timeout=40)
        assert answer.status_code == 401
        texts.add(answer.text)
        assert wrong not in answer.text
    assert len(texts) == 1


def test_a_logout_and_a_revoked_key_end_a_session(operate, watched, ui_service) -> None:
    page = operate()
    (cookie,) = page.context.cookies()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Operator's key")).to_be_visible()
    assert page.context.cookies() == []
    kept = {"Cookie": f"{cookie['name']}={cookie['value']}"}
    assert httpx.get(f"{ui_service.ops_url}/ops/overview", headers=kept, timeout=40).status_code == 303
    second = weft(ui_service.data, "operator", "create", "--note", "short").strip()
    page.get_by_label("Operator's key").fill(second)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    watched[0].expected.append("401")
    weft(ui_service.data, "operator", "revoke", second)
    # The part that refreshes itself finds the session ended and opens the login.
    expect(page.get_by_label("Operator's key")).to_be_visible()
