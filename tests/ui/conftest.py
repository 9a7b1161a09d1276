"""One service with two tenants for all tests of the dashboard, and a Chromium for each module. No test here is async.

``browse(tenant)`` gives a page that is logged in. ``axe(page)`` checks it. Pages are watched (``tests.ui.browser``).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from testing.chromium import chromium_path
from testing.operator_command import weft
from testing.service_process import ServiceProcess
from tests.conftest import missing_service
from tests.e2e.conftest import BASE_NAME, make_key, make_tenant
from tests.e2e.raw_client import RawClient
from tests.e2e.speaker import MEOW, WOOF, Speaker, teach
from tests.e2e.test_observability import free_port
from tests.ui.browser import SECONDS, Watched, check_accessible, launched, log_in, watched_context
from tests.ui.still_queue import StillQueue
from tests.ui.stored import write_rows

_WHOLE_SECRET = re.compile(rb"tml-[0-9a-f]{12}-[A-Za-z0-9_-]{20,}|__Host-weft[a-z-]*=[A-Za-z0-9_-]{20,}")


@dataclass
class UiTenant:
    """A tenant of the service; ``keys`` are by role."""

    name: str
    data: Path
    key: str
    keys: dict[str, str] = field(default_factory=dict)

    def key_of(self, role: str) -> str:
        """Return a key of that role, made when it is first asked for."""
        if role not in self.keys:
            self.keys[role] = make_key(self.data, self.name, role=role)
        return self.keys[role]


@dataclass(frozen=True)
class UiService:
    """The running service; ``cats`` and ``dogs`` are its tenants, whose keys are of admins.

    ``ops_url`` is the admin listener's, ``operator_key`` opens it. ``codes`` are the one-time codes that were made.
    """

    process: ServiceProcess
    data: Path
    cats: UiTenant
    dogs: UiTenant
    ops_url: str
    operator_key: str
    codes: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.process.base_url

    def link(self, key: str, *options: str, address: str) -> str:
        """Return a link of ``weft ui open``, whose code nothing may keep."""
        printed = weft(self.data, "ui", "open", key, "--address", address, *options).split()[0]
        self.codes.append(printed.partition("#code=")[2])
        assert len(self.codes[-1]) >= 22
        return printed


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """The Chromium of all pages. Playwright holds the thread's event loop, so it ends before other folders' async tests."""
    if chromium_path() is None:
        missing_service("Chromium", "`chromium` is not on the path; `.ci/chromium` installs Debian's")
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright:
        browser = launched(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def ui_service(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[UiService]:
    """``weft serve`` on the tiny base."""
    data = tmp_path_factory.mktemp("ui") / "data"
    port = free_port()
    environment = {
        "WEFT_ADMIN_PORT": str(port),
        "WEFT_WEBHOOK_NETWORKS": '["127.0.0.0/8"]',
        "WEFT_HOUSEKEEPING_INTERVAL": "2",
    }
    bases = [f"{BASE_NAME}={tiny_model_dir}"]
    with ServiceProcess(data=data, base_models=bases, environment=environment) as process:
        tenants = []
        for name in ("cats", "dogs"):
            make_tenant(data, name)
            key = make_key(data, name, role="admin")
            tenants.append(UiTenant(name, data, key, {"admin": key}))
        operator_key = weft(data, "operator", "create", "--note", "tests").strip()
        service = UiService(process, data, *tenants, f"http://127.0.0.1:{port}", operator_key)
        yield service
        assert_no_secret_is_kept(service)


def assert_no_secret_is_kept(service: UiService) -> None:
    """Assert that neither log nor database has a whole key, a session's secret or a one-time code, whatever was done."""
    kept = {"log": service.process.log_tail(10**8).encode()}
    kept |= {path.name: path.read_bytes() for path in service.data.glob("weft.db*")}
    assert {name for name, content in kept.items() if content} >= {"log", "weft.db"}
    codes = [re.escape(code.encode()) for code in service.codes]
    secret = re.compile(b"|".join([_WHOLE_SECRET.pattern, *codes]))
    for name, content in kept.items():
        found = secret.search(content)
        assert found is None, f"{name} keeps a secret: …{content[found.start() - 200 : found.start() + 20]!r}"


@pytest.fixture(scope="package")
def speakers(ui_service: UiService) -> Iterator[tuple[Speaker, Speaker]]:
    """Adapters of the two tenants, with the versions ``meow`` and ``woof``, and ``moo``. They have learned little."""
    clients = [RawClient(ui_service.url, tenant.key) for tenant in (ui_service.cats, ui_service.dogs)]
    yield teach(clients[0], {MEOW: 2, WOOF: 2}), teach(clients[1], {"moo ": 1})
    for client in clients:
        client.close()


@pytest.fixture
def cat(speakers: tuple[Speaker, Speaker]) -> Iterator[Speaker]:
    """The first tenant's adapter, which follows ``meow`` and is open before and after."""
    speakers[0].says(MEOW)
    yield speakers[0]
    speakers[0].gate("resume")


@pytest.fixture
def still(ui_service: UiService) -> Iterator[StillQueue]:
    """Work of both tenants that waits for its turn and is not begun."""
    queue = StillQueue(ui_service.data)
    write_rows(ui_service.data, queue.fill)
    yield queue
    write_rows(ui_service.data, queue.empty)


Browse = Callable[..., Page]


@pytest.fixture
def watched() -> list[Watched]:
    """The watchers of the test's contexts, in the order in which they were opened."""
    return []


@pytest.fixture
def browse(chromium: Browser, ui_service: UiService, watched: list[Watched]) -> Iterator[Browse]:
    """Give pages: ``browse(tenant)`` logged in as its admin, ``browse(tenant, role="viewer")``, ``browse(None)`` not logged in.

    Further options are Playwright's of a context, such as ``color_scheme="dark"``.
    """
    with ExitStack() as stack:

        def opened(tenant: UiTenant | None, *, role: str = "admin", **options: object) -> Page:
            context, one = stack.enter_context(watched_context(chromium, ui_service.url, **options))
            watched.append(one)
            page = context.new_page()
            if tenant is not None:
                log_in(page, tenant.key_of(role))
            return page

        yield opened


@pytest.fixture
def axe() -> Callable[[Page], None]:
    """The check of a page's accessibility."""
    return check_accessible


@pytest.fixture
def operate(chromium: Browser, ui_service: UiService, watched: list[Watched]) -> Iterator[Callable[..., Page]]:
    """Give pages that are logged in as an operator."""
    with ExitStack() as stack:

        def opened(**options: object) -> Page:
            context, one = stack.enter_context(watched_context(chromium, ui_service.ops_url, **options))
            watched.append(one)
            page = context.new_page()
            page.goto("/ops")
            page.get_by_label("Operator's key").fill(ui_service.operator_key)
            page.get_by_role("button", name="Log in").click()
            expect(page.get_by_role("heading", name="Overview")).to_be_visible()
            return page

        yield opened
