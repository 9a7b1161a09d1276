"""Buttons of operators on runs, sessions and trainers: told without a reload, audited, and refused in words."""

import json
import re
from collections.abc import Iterator
from contextlib import closing

import pytest
from playwright.sync_api import Page, expect

from testing.operator_command import weft
from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient, pass_message
from tests.ui.conftest import UiService
from tests.ui.test_operators import entries, id_of

BLANKS = "   "
"""A reason that the browser takes for one."""
NO_REASON = re.compile(r"nothing was changed: it needs a reason, .*send the form again")


class Training:
    """A tenant's run that takes steps."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.session = client.session()
        self.run = client.model(BASE_NAME, self.session)
        self.steps = 0

    def step(self) -> None:
        """Take a step, which must succeed."""
        first = 2 * self.steps + 1
        self.client.passes(pass_message(self.run, first, [1, 2, 3, 4])).raise_for_status()
        found = self.client.result(self.client.step(self.run, first + 1))
        assert "error" not in found, found
        self.steps += 1


@pytest.fixture
def pair(ui_service: UiService) -> Iterator[tuple[Training, Training]]:
    """Runs of both tenants, which have taken a step each."""
    keys = (ui_service.cats.key, ui_service.dogs.key)
    with closing(RawClient(ui_service.url, keys[0])) as cat, closing(RawClient(ui_service.url, keys[1])) as dog:
        trained = Training(cat), Training(dog)
        for one in trained:
            one.step()
        yield trained


def audited(service: UiService, action: str) -> list[dict[str, object]]:
    """Return the entries of an action, the latest first."""
    found: list[dict[str, object]] = json.loads(weft(service.data, "audit", "list", "--action", action, "--json"))[
        "items"
    ]
    return found


def press(page: Page, button: str, reason: str) -> None:
    page.get_by_label("Reason").fill(reason)
    page.get_by_role("button", name=button).click()


def test_a_run_is_paged_out_by_a_button_and_comes_back_by_its_next_step(operate, watched, ui_service, pair) -> None:
    cats, dogs = pair
    page, beside = operate(), operate()
    watched[0].expected.append("400")
    page.goto(f"/ops/runs/{cats.run}")
    beside.goto(f"/ops/runs/{dogs.run}")
    facts, history = page.locator("dl.facts"), page.locator("[aria-labelledby=history] tbody tr")
    for one in (page, beside):
        expect(one.locator("dl.facts")).to_contain_text("in memory")
        expect(one.locator("dl.facts")).to_contain_text("1 optimizer step;")
    press(page, "Page out", BLANKS)
    expect(page.get_by_role("alert")).to_have_text(NO_REASON)
    assert entries(ui_service, ui_service.cats, "run_evict") == []
    press(page, "Page out", "room")
    expect(facts).to_contain_text("not in memory")
    expect(history.filter(has_text="evicted")).to_have_count(1)
    (told,) = entries(ui_service, ui_service.cats, "run_evict")
    assert (told["door"], told["actor"]) == ("ui", ui_service.operator_key[:16])
    assert told["after"]["reason"] == "room"
    cats.step()
    dogs.step()
    expect(facts).to_contain_text("2 optimizer steps;")
    expect(facts.locator(".badge-good", has_text="in memory")).to_be_visible()
    expect(beside.locator("dl.facts")).to_contain_text("2 optimizer steps;")
    expect(beside.locator("[aria-labelledby=history]")).not_to_contain_text("evicted")
    assert entries(ui_service, ui_service.dogs, "run_evict") == []


def test_a_move_that_cannot_be_says_so_and_names_what_to_do(operate, watched, ui_service, pair) -> None:
    cats, _ = pair
    page = operate()
    watched[0].expected += ["400", "404"]
    place = f"/ops/runs/{cats.run}"
    trainer = json.loads(weft(ui_service.data, "run", "show", cats.run, "--json"))["trainer_id"]
    for to, reason, told in (
        ("", BLANKS, NO_REASON),
        ("nobody", "room", re.compile(r"no trainer's id begins with 'nobody'; `weft trainer list` shows them")),
        (
            trainer,
            "room",
            re.compile(f"trainer {trainer} has the run already: name another one, or none for any other"),
        ),
    ):
        page.goto(place)
        page.get_by_label("Trainer; empty: any").fill(to)
        press(page, "Move", reason)
        expect(page.get_by_role("alert")).to_have_text(told)
        expect(page.locator("dl.facts")).to_contain_text("in memory")
    assert entries(ui_service, ui_service.cats, "run_move") == []
    for one in pair:
        one.step()


def before(session: str) -> str:
    """Return the id before a session's, behind which a page begins with it."""
    return f"{int(session, 16) - 1:032x}"


def test_a_session_is_ended_with_a_reason_that_its_client_reads_and_no_other_is(
    operate, watched, ui_service, pair
) -> None:
    cats, dogs = pair
    waits = cats.client.step(cats.run, 99)
    page = operate()
    watched[0].expected += ["400", "404"]
    page.goto(f"/ops/sessions?tenant_id={id_of(ui_service, ui_service.cats)}&after={before(cats.session)}")
    row = page.locator("tr", has_text=cats.session)
    expect(row.locator(".badge-good")).to_have_text("open")
    row.get_by_text("End…").click()
    press(row, "End session", BLANKS)
    expect(page.get_by_role("alert")).to_have_text(NO_REASON)
    row.get_by_text("End…").click()
    row.locator("form").evaluate("(one) => (one.action = '/ops/sessions/nothing/end')")
    press(row, "End session", "stuck")
    expect(page.get_by_role("alert")).to_have_text("no session 'nothing'; a run's id begins with its session's")
    assert entries(ui_service, ui_service.cats, "session_end") == []
    row.get_by_text("End…").click()
    press(row, "End session", "stuck")
    expect(row).to_contain_text("ended by operator")
    expect(row).to_contain_text("stuck")
    expect(row.get_by_role("button")).to_have_count(0)
    # The list is still of the tenant's sessions.
    expect(page.locator("tr", has_text=dogs.session)).to_have_count(0)
    told = cats.client.result(waits)["error"]
    assert "the service's operator has ended the session: stuck" in told
    (told,) = entries(ui_service, ui_service.cats, "session_end")
    assert (told["door"], told["after"]) == ("ui", {"reason": "stuck"})
    assert entries(ui_service, ui_service.dogs, "session_end") == []
    dogs.step()
    page.goto(f"/ops/sessions?tenant_id=dogs&after={before(dogs.session)}")
    expect(page.locator("tr", has_text=dogs.session).locator(".badge-good")).to_have_text("open")


def test_the_last_trainer_of_a_base_is_drained_and_its_row_says_what_waits(operate, watched, ui_service, pair) -> None:
    page, beside = operate(), operate()
    watched[0].expected += ["400", "404"]
    beside.goto("/ops/processes")
    page.goto("/ops/processes")
    before = len(audited(ui_service, "trainer_drain"))
    trainer = page.locator("[aria-labelledby=trainers] tr[data-process]", has_text=BASE_NAME)
    form = page.locator(f'form[data-key="drain {trainer.get_attribute("data-process")}"]')
    press(form, "Drain", BLANKS)
    expect(page.get_by_role("alert")).to_have_text(NO_REASON)
    # At once: the live part of the page puts the address back.
    form.evaluate(
        "(one) => {"
        " one.action = '/ops/processes/nobody/drain'; one.elements.reason.value = 'new driver'; one.requestSubmit(); }"
    )
    expect(page.get_by_role("alert")).to_have_text(
        "no trainer's id begins with 'nobody'; `weft trainer list` shows them"
    )
    assert len(audited(ui_service, "trainer_drain")) == before
    press(form, "Drain", "new driver")
    try:
        for one in (page, beside):
            row = one.locator("[aria-labelledby=trainers] tr[data-process]", has_text=BASE_NAME)
            expect(row).to_contain_text("drained")
            expect(row).to_contain_text("new driver")
            expect(row).to_contain_text("their work waits: start one, or have it work again")
        told, *earlier = audited(ui_service, "trainer_drain")
        assert len(earlier) == before
        assert (told["door"], told["after"]["reason"]) == ("ui", "new driver")
    finally:
        # The page that was only left open has the button, too.
        beside.get_by_role("button", name="Have it work again").click()
    expect(form.get_by_role("button", name="Drain")).to_be_visible()
    expect(row.locator(".badge-good")).to_have_text("works")
    for one in pair:
        one.step()


def test_a_directive_that_cannot_be_says_so_and_the_replica_goes_on(operate, watched, ui_service, speakers) -> None:
    page = operate()
    watched[0].expected += ["400", "404"]
    page.goto("/ops/replicas")
    known = page.locator("tr[data-replica]", has_text=BASE_NAME).get_attribute("data-replica") or ""
    before = len(audited(ui_service, "replica_direct"))
    for name, button, told in (
        (known, "Sleep", NO_REASON),
        ("", "Work", re.compile("nothing was changed: name the base model and the replica, as the table has them")),
        ("nobody", "Work", re.compile("no replica 'nobody' of weft/tiny; the table has those that are known")),
    ):
        page.get_by_label("Base model").select_option(BASE_NAME)
        page.get_by_label("Replica", exact=True).fill(name)
        press(page, button, BLANKS)
        expect(page.get_by_role("alert")).to_have_text(told)
    assert len(audited(ui_service, "replica_direct")) == before
    expect(page.locator(f'tr[data-replica="{known}"] .badge-good')).to_be_visible()
    for speaker in speakers:
        assert speaker.stream(tokens=4).finish()["sequences"]
