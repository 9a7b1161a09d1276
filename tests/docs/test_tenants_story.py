"""The commands of a tenant's whole life run as the page has them, over the admin API of a real service."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from testing.operator_command import weft, weft_over_http
from testing.reserved_port import ReservedPort
from testing.service_process import ServiceProcess
from tests.conftest import ROOT, missing_service
from tests.e2e.raw_client import RawClient

PAGE = ROOT / "docs" / "how-to" / "a-tenant-from-first-to-last.md"
BASE = "my/tiny"
SECONDS = 120
PROMPT = [72, 101, 108, 108, 111]
DRAWN = 8


@dataclass
class Story:
    """An operator at a shell, the tenant of the page once it is there, and another tenant."""

    service: ServiceProcess
    admin: tuple[str, str]
    folder: Path
    other: "Customer"
    tenant: "Customer | None" = None
    printed: dict[str, str] = field(default_factory=dict)

    def run(self, line: str) -> str:
        """Run a line of the page and return what it prints. One that joins commands is run by a shell."""
        if not re.search(r"[|>]", line):
            return weft_over_http(*self.admin, *shlex.split(line, comments=True)[1:])
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"WEFT_ADMIN_URL": self.admin[0], "WEFT_ADMIN_KEY": self.admin[1], "PATH": path}
        shell = ["bash", "-e", "-o", "pipefail", "-c", line]
        ended = subprocess.run(shell, capture_output=True, text=True, timeout=SECONDS, env=environment, cwd=self.folder)
        assert ended.returncode == 0, (line, ended.stderr[-2000:])
        return ended.stdout


class Customer:
    """A tenant's client: one sampler of the base, whose samples it waits for."""

    def __init__(self, service: ServiceProcess, key: str) -> None:
        self.http = RawClient(service.base_url, key)
        self.session = self.http.session()
        made = self.http.post(
            "/create_sampling_session", session_id=self.session, sampling_session_seq_id=0, base_model=BASE
        )
        self.sampler: str = made.raise_for_status().json()["sampling_session_id"]
        self.sent = 0

    def samples(self) -> int:
        """Status of a sample that is sent; one that is accepted is waited for."""
        self.sent += 1
        asked = {"sampling_session_id": self.sampler, "seq_id": self.sent, "num_samples": 1}
        prompt = {"chunks": [{"tokens": PROMPT}]}
        params = {"max_tokens": DRAWN, "temperature": 0.0, "stop": []}
        answer = self.http.post("/asample", **asked, prompt=prompt, sampling_params=params)
        if answer.status_code == 200:
            (sequence,) = self.http.result(answer)["sequences"]
            assert len(sequence["tokens"]) == DRAWN
        return answer.status_code

    def lists(self) -> int:
        """Status of a list of its sessions."""
        return self.http.http.get("/sessions").status_code


def _lines() -> list[str]:
    """Return the page's commands, but for the one that says where the service is."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert lines[0].startswith("export WEFT_ADMIN_URL=")
    return lines[1:]


@pytest.fixture
def story(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Story]:
    if shutil.which("jq") is None:
        missing_service("jq", "the page's commands need it; install it")
    reserved = ReservedPort()
    port = reserved.number
    data, environment = tmp_path / "weft-data", {"WEFT_ADMIN_PORT": str(port)}
    with ServiceProcess(data=data, base_models=[f"{BASE}={tiny_model_dir}"], environment=environment) as service:
        admin = (f"http://127.0.0.1:{port}", weft(data, "operator", "create").strip())
        other = Customer(service, service.first_key or "")
        made = Story(service, admin, tmp_path, other)
        yield made
        for customer in (other, made.tenant):
            if customer is not None:
                customer.http.close()
    reserved.close()


def _came(story: Story, printed: str) -> None:
    story.tenant = Customer(story.service, printed.strip())
    assert story.tenant.samples() == 200


def _limited(story: Story, printed: str) -> None:
    (pending,) = [line for line in printed.splitlines() if line.startswith("pending_samples")]
    assert "2000" in pending


def _made_a_key(story: Story, printed: str) -> None:
    second = Customer(story.service, printed.strip())
    assert second.samples() == 200
    second.http.close()


def _shows_its_session(story: Story, printed: str) -> None:
    assert story.tenant is not None
    assert (story.tenant.session in printed, story.other.session in printed) == (True, False)


def _is_read_only(story: Story, printed: str) -> None:
    assert story.tenant is not None
    assert (story.tenant.samples(), story.tenant.lists()) == (403, 200)
    assert story.other.samples() == 200


def _goes_on(story: Story, printed: str) -> None:
    assert story.tenant is not None
    assert (story.tenant.samples(), story.tenant.lists()) == (200, 200)


def _counts_its_tokens(story: Story, printed: str) -> None:
    # Three samples by then: its own two, and one by its second key.
    assert int(printed) == 3 * (len(PROMPT) + DRAWN)


def _is_a_document(story: Story, printed: str) -> None:
    head, *lines = (story.folder / "august.csv").read_text().splitlines()
    assert ("BilledCost" in head, lines) == (True, [])


AFTER: dict[str, Callable[[Story, str], None]] = {
    "weft tenant create": _came,
    "weft tenant limits": _limited,
    "weft key create": _made_a_key,
    "weft session list": _shows_its_session,
    "weft tenant suspend": _is_read_only,
    "weft tenant resume": _goes_on,
    "weft tenant usage": _counts_its_tokens,
    "weft usage export": _is_a_document,
    "weft tenant delete": _is_read_only,
    "weft tenant restore": _goes_on,
}
"""Outcome of each command, by its beginning."""


def test_a_tenants_whole_life_goes_as_its_page_tells_it(story: Story) -> None:
    """Another tenant samples to the end."""
    lines = _lines()
    assert len(lines) > 15
    assert [start for start in AFTER if sum(line.startswith(start) for line in lines) != 1] == []
    for line in lines:
        printed = story.run(line)
        for start, check in AFTER.items():
            if line.startswith(start):
                check(story, printed)
    assert "works" in story.run("weft tenant list")
    assert story.other.samples() == 200
