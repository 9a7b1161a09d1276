"""Thirty-two equal tenants and one that floods, all with more work than the service can do: equal parts, on the screen."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from testing.operator_command import weft
from testing.service_process import ServiceProcess
from testing.tenants import make_tenants
from tests.e2e.conftest import BASE_NAME
from tests.e2e.raw_client import RawClient, pass_message
from tests.e2e.test_observability import free_port
from tests.ui.browser import SECONDS, watched_context

TENANTS, PASSES, FLOOD = 32, 8, 40
SEQUENCES, LENGTH = 4, 256
"""Sequences of a pass, and tokens of each."""
TOKENS = SEQUENCES * LENGTH
BUDGET = 1024
"""Tokens of a fused pass."""
BOUND = 3 * BUDGET / 16 + 2 * LENGTH + TOKENS
"""Tokens by which two tenants of one share differ at most while both have work (``workers.training.scheduler``).

An operation counts once it has ended, so there is one more.
"""
NAMES = [f"equal-{number:02}" for number in range(TENANTS)] + ["flood"]


@dataclass(frozen=True)
class Row:
    """A tenant's row on the page: what waits, and its last five minutes."""

    name: str
    pending: int
    tokens: int
    served: float
    entitled: float


@pytest.fixture
def service(tmp_path: Path, tiny_model_dir: Path) -> Iterator[tuple[ServiceProcess, Path, str, list[str]]]:
    """A service of its own: in another test's the tenants' parts would be of more than what they do."""
    data, port = tmp_path / "data", free_port()
    keys = in_a_thread(make_tenants, data, NAMES)
    environment = {"WEFT_ADMIN_PORT": str(port), "WEFT_PASS_TOKEN_BUDGET": str(BUDGET)}
    with ServiceProcess(data=data, base_models=[f"{BASE_NAME}={tiny_model_dir}"], environment=environment) as process:
        yield process, data, f"http://127.0.0.1:{port}", keys


def in_a_thread(work, *arguments):
    """Run ``work`` in a thread of its own: Playwright has an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work, *arguments).result()


def fill(url: str, keys: list[str]) -> None:
    """Have every tenant queue its passes, turn by turn, and then the flood."""
    clients = [RawClient(url, key) for key in keys]
    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(lambda client: client.model(BASE_NAME), clients))

        def send(place: int, seq_id: int) -> None:
            message = pass_message(runs[place], seq_id, [one % 256 for one in range(LENGTH)])
            for _ in range(SEQUENCES - 1):
                message.data.add().CopyFrom(message.data[0])
            clients[place].passes(message).raise_for_status()

        for seq_id in range(1, PASSES + 1):
            list(threads.map(send, range(TENANTS), [seq_id] * TENANTS))
        for seq_id in range(1, FLOOD + 1):
            send(TENANTS, seq_id)
    for client in clients:
        client.close()


def rows_of(page: Page) -> dict[str, Row]:
    """Return what the page shows."""
    found = page.locator("tr[data-tenant]").evaluate_all(
        """rows => rows.map((row) => {
          const cell = row.querySelector('[data-window="300"]');
          const {served, entitled} = cell.querySelector('.against').dataset;
          return [row.dataset.tenant, row.dataset.pending, cell.dataset.tokens, served, entitled];
        })"""
    )
    return {
        name: Row(name, int(pending), int(tokens), float(part), float(due))
        for name, pending, tokens, part, due in found
    }


def test_equal_tenants_beside_a_flood_are_served_what_they_are_entitled_to_on_screen(
    chromium: Browser, service: tuple[ServiceProcess, Path, str, list[str]]
) -> None:
    process, data, ops_url, keys = service
    key = weft(data, "operator", "create", "--note", "tests").strip()
    with watched_context(chromium, ops_url) as (context, _):
        page = context.new_page()
        page.goto("/ops")
        page.get_by_label("Operator's key").fill(key)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        fill(process.base_url, keys)
        page.goto("/ops/tenants")
        began = rows_of(page)
        now = later(page, {name: one.tokens + 2 * TOKENS for name, one in began.items()})
    assert sorted(began) == sorted(now) == sorted(NAMES)
    assert all(one.pending for one in now.values()), "the comparison holds while all have work"
    served = {name: one.tokens - began[name].tokens for name, one in now.items()}
    assert max(served.values()) - min(served.values()) < BOUND, served
    total = sum(one.tokens for one in now.values())
    for name, one in now.items():
        assert one.entitled == pytest.approx(1 / len(NAMES))
        assert one.served == pytest.approx(one.tokens / total)
        # The flood has come last, so it has had less by then.
        assert (one.served - one.entitled) * total < BOUND, one
        assert name == "flood" or (one.entitled - one.served) * total < BOUND, one


def later(page: Page, tokens: dict[str, int]) -> dict[str, Row]:
    """Look again until every tenant was served so many tokens. Raises ``AssertionError``."""
    deadline = time.monotonic() + 3 * SECONDS
    while True:
        page.reload()
        rows = rows_of(page)
        if all(one.tokens >= tokens[name] for name, one in rows.items()):
            return rows
        assert time.monotonic() < deadline, rows
