"""Two real vLLM servers of a whole ``weft up``: one is killed in the midst of samples, and conversations keep their server."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from testing.chromium import chromium_path
from testing.cluster_process import started_service
from testing.operator_command import weft
from tests.conftest import missing_service, need_postgres, need_redis
from tests.e2e.conftest import BASE_NAME, FLOW_SECONDS, VLLM_PYTHON, Service
from tests.e2e.raw_client import RawClient
from tests.e2e.speaker import MEOW, Speaker, teach
from tests.e2e.test_observability import free_port
from tests.ui.browser import launched, watched_context
from tests.unix_http import unix_client

REPLICAS = ("pool-0/vllm-0", "pool-0/vllm-1")
RESTART_SECONDS = 150.0
LEASE_SECONDS = 10.0
RED_SECONDS = LEASE_SECONDS + 10.0
"""Longest time until the operators' page, which looks every two seconds, has a dead server in red, on a slow machine, too."""
MOST_KL = 1e-6
"""Nats a token, of a trained adapter's samples in float32."""
BLOCK = 128
"""Tokens of a block of vLLM's prefix cache on a CPU: only whole blocks are found again."""
TURNS = 4
MOST_KEYS = 16
SAID = 48
"""Tokens of a turn, half of them drawn."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Service]:
    """``weft up`` with two servers, by that number alone, and few connections: another cluster may run meanwhile."""
    if not VLLM_PYTHON.exists():
        missing_service("vLLM", "no .venv-vllm; run: make vllm")
    need_redis()
    need_postgres()
    data = tmp_path_factory.mktemp("two") / "data"
    environment = {
        "WEFT_VLLM_REPLICAS": str(len(REPLICAS)),
        "WEFT_DATABASE_POOL": "4",
        "WEFT_ADMIN_PORT": str(free_port()),
        "WEFT_LEASE": str(LEASE_SECONDS),
    }
    base_models = [f"{BASE_NAME}={tiny_model_dir}"]
    tenants = ("first", "second")
    with started_service(
        data=data, base_models=base_models, tenants=tenants, environment=environment, is_cluster=True
    ) as (process, keys):
        yield Service(process, data, tiny_model_dir, *keys)


@pytest.fixture(scope="module")
def pair(service: Service) -> Iterator[tuple[Speaker, Speaker]]:
    """Two tenants; their words differ by their runs' random weights."""
    clients = [RawClient(service.base_url, key) for key in (service.key, service.other_key)]
    yield teach(clients[0], {MEOW: 2}), teach(clients[1], {MEOW: 4})
    for client in clients:
        client.close()


def server_of(service: Service, replica: str) -> psutil.Process:
    """The process of the server that the replica's log belongs to."""
    for child in psutil.Process(service.process.pid).children(recursive=True):
        is_server = "--served-model-name" in child.cmdline() and os.getpgid(child.pid) == child.pid
        if is_server and Path(os.readlink(f"/proc/{child.pid}/fd/2")).stem.endswith(replica.replace("/", "-")):
            return child
    raise AssertionError(f"no server of {replica}")


def send_directive(service: Service, action: str, replica: str) -> None:
    """Send a replica directive by the admin command, and wait until the replica's process tells that it follows."""
    condition = {"drain": "draining", "work": "works"}[action]
    command = ("replica", action, replica, "--base", BASE_NAME)
    weft(service.data, *command, environment=service.process.environment)
    deadline = time.monotonic() + RESTART_SECONDS
    while time.monotonic() < deadline:
        listed = weft(service.data, "replica", "list", "--json", environment=service.process.environment)
        (found,) = [one for one in json.loads(listed)["items"] if one["replica"] == replica]
        if found["condition"] == condition:
            return
    raise AssertionError(f"{replica} is not {condition}")


@contextmanager
def replicas_page(service: Service) -> Iterator[Page]:
    """Open the operators' page of replicas in Chromium, which ends with the block: Playwright holds the thread's event loop."""
    key = weft(service.data, "operator", "create", "--note", "tests", environment=service.process.environment).strip()
    if chromium_path() is None:
        missing_service("Chromium", "`chromium` is not on the path; `.ci/chromium` installs Debian's")
    with sync_playwright() as playwright:
        url = f"http://127.0.0.1:{service.process.environment['WEFT_ADMIN_PORT']}"
        browser = launched(playwright)
        with watched_context(browser, url) as (context, _):
            page = context.new_page()
            page.goto("/ops")
            page.get_by_label("Operator's key").fill(key)
            page.get_by_role("button", name="Log in").click()
            expect(page.get_by_role("heading", name="Overview")).to_be_visible()
            page.goto("/ops/replicas")
            yield page
        browser.close()


def sampled_on(speaker: Speaker, replica: str) -> list[int]:
    """Return a whole sample drawn on ``replica``: try new sessions until the other replica follows its directive."""
    deadline = time.monotonic() + RESTART_SECONDS
    for number in itertools.count(1000):
        stream = speaker.stream(sampler=speaker.pinned(MEOW, number))
        tokens: list[int] = speaker.client.wait(stream.request_id, seconds=RESTART_SECONDS).json()["sequences"][0][
            "tokens"
        ]
        if speaker.report(stream)["replicas"] == [replica]:
            return tokens
        if time.monotonic() > deadline:
            break
    raise AssertionError(f"{replica} takes no work")


def test_the_sampler_draws_from_what_was_trained(service: Service) -> None:
    """The losses' own metrics tell it, in float32; prompts are scored by the trainer's forward. Both servers shook hands."""
    command = [sys.executable, str(Path(__file__).with_name("sdk_on_policy.py")), service.base_url]
    command += [service.key, service.other_key, BASE_NAME]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=FLOW_SECONDS)
    assert finished.returncode == 0, finished.stderr[-4000:]
    seen = json.loads(finished.stdout.strip().splitlines()[-1])
    assert seen["sampled"] > 0
    assert max(seen["kl"], seen["others_kl"]) < MOST_KL
    assert seen["scores_off"] < 1e-4
    log = service.process.printed_tail(10**7)
    assert all(f"replica {replica} passed its handshake" in log for replica in REPLICAS)
    assert len(re.findall(rf"a vLLM server for {BASE_NAME} gets \d+\.\d+ GiB on ", log)) == len(REPLICAS)


def test_a_replica_killed_mid_stream_loses_nothing_and_comes_back(
    service: Service, pair: tuple[Speaker, Speaker]
) -> None:
    expected = [speaker.uncut(MEOW) for speaker in pair]
    # The page before the streams: it takes seconds to open, in which they could end.
    with replicas_page(service) as page:
        rows = {name: page.locator(f'tr[data-replica="{name}"]') for name in REPLICAS}
        for row in rows.values():
            expect(row.locator(".badge-good")).to_be_visible()
        streams = [[speaker.stream(sampler=speaker.pinned(MEOW, 200 + n)) for n in range(4)] for speaker in pair]
        for stream in (*streams[0], *streams[1]):
            stream.until_tokens(5)
        victim = next(iter(pair[0].gate()["versions"]))
        (other,) = set(REPLICAS) - {victim}
        server = server_of(service, victim).pid
        os.killpg(server, signal.SIGSTOP)
        # What has ended by now was not drawn by a server that died.
        both = [(speaker, stream) for speaker, mine in zip(pair, streams, strict=True) for stream in mine]
        over = {stream.request_id for speaker, stream in both if speaker.has_ended(stream)}
        os.killpg(server, signal.SIGKILL)
        expect(rows[victim].locator(".badge-bad")).to_have_text("down", timeout=1000 * RED_SECONDS)
        expect(rows[other].locator(".badge-good")).to_be_visible()
    moved = 0
    for speaker, tokens, mine in zip(pair, expected, streams, strict=True):
        for stream in mine:
            assert stream.finish()["sequences"][0]["tokens"] == tokens
            report = speaker.report(stream)
            is_moved = report["replicas"][0] == victim and stream.request_id not in over
            moved += is_moved
            assert (report["attempts"] > 1) == is_moved
            assert report["replicas"][-1] != victim or stream.request_id in over
    assert moved
    # Started again it knows no adapter, and gets each at its first sample; with the other drained, all come to it.
    send_directive(service, "drain", other)
    for speaker, tokens in zip(pair, expected, strict=True):
        assert sampled_on(speaker, victim) == tokens
    send_directive(service, "work", other)


def cached_tokens(service: Service) -> float:
    """Tokens of prompts that the servers have found in their prefix caches so far, by their own counters."""
    found = 0.0
    for replica in REPLICAS:
        command = server_of(service, replica).cmdline()
        with unix_client(command[command.index("--uds") + 1]) as client:
            counters = client.get("/metrics").text
        hits = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", counters, re.MULTILINE)
        found += sum(map(float, hits))
    return found


@dataclass
class Conversations:
    """Replicas of each conversation's turns, and the tokens of prompts that turns at home find in whole blocks."""

    replicas: list[list[str]] = field(default_factory=list)
    known: int = 0

    @property
    def homes(self) -> set[str]:
        """Replicas of the conversations' first turns."""
        return {replicas[0] for replicas in self.replicas}

    def hold(self, speaker: Speaker, keys: Sequence[str | None]) -> "Conversations":
        """Hold a conversation for each key, each of its turns by a sampling session of its own."""
        for key in keys:
            self.replicas.append([])
            tokens = [(7 * place + 31 * len(self.replicas)) % 250 for place in range(3 * BLOCK)]
            for number in range(TURNS):
                body = speaker.body(tokens=SAID // 2, sampler=speaker.pinned(MEOW, 2000 + speaker.asked))
                body |= {"prompt": {"chunks": [{"tokens": tokens}]}, "trajectory": key}
                request_id = speaker.client.post("/asample", **body).json()["request_id"]
                drawn = speaker.client.wait(request_id).json()["sequences"][0]["tokens"]
                self.replicas[-1] += speaker.client.http.get(f"/samples/{request_id}").json()["replicas"]
                if number:
                    self.known += (len(tokens) - SAID // 2) // BLOCK * BLOCK
                tokens = tokens + drawn + [(11 * place) % 250 for place in range(SAID // 2)]
        return self


def test_turns_of_a_trajectory_find_their_prefix_on_their_home(service: Service, pair: tuple[Speaker, Speaker]) -> None:
    """The neighbour holds conversations of the same keys meanwhile: its turns have homes of their own."""
    # Each replica has loaded the adapter before hits are counted. Left alone, all samples may go to the other one.
    for replica in REPLICAS:
        (other,) = set(REPLICAS) - {replica}
        send_directive(service, "drain", other)
        sampled_on(pair[0], replica)
        send_directive(service, "work", other)
    before = cached_tokens(service)
    held = (Conversations(), Conversations())
    with ThreadPoolExecutor(2) as threads:
        # A home follows from the tenant's random id, too: more keys, until some have each home.
        for number in range(MOST_KEYS):
            key = f"conversation {number}"
            list(threads.map(lambda mine, speaker, key=key: mine.hold(speaker, [key]), held, pair))
            if number >= 1 and held[0].homes | held[1].homes == set(REPLICAS):
                break
    hits = cached_tokens(service) - before
    for mine in held:
        assert [len(set(replicas)) for replicas in mine.replicas] == [1] * (number + 1)
    assert held[0].homes | held[1].homes == set(REPLICAS)
    assert hits >= sum(mine.known for mine in held)
