"""Two vLLM servers that somebody else runs: they see weft's data folder under another path, and one may refuse adapters."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from contracts.base_model import read_base_model_facts
from engine.sampling.vllm.process import VllmProcess
from store.data_folder import DataFolder
from store.settings import Settings
from testing.service_process import ServiceProcess
from tests.e2e.conftest import BASE_NAME, Service, make_tenant
from tests.e2e.raw_client import RawClient
from tests.e2e.serving_proxy import ServingProxy, serving_proxy
from tests.e2e.speaker import LONG, MEOW, WOOF, Speaker, teach
from tests.engine.sampling.vllm.conftest import running_server
from tests.unix_http import unix_client
from workers.sampling.replica_sources import ManagedVllm, vllm_sources

REPLICAS = {"left", "right"}


@dataclass(frozen=True)
class External:
    """A service on two servers. ``seen`` is the data folder as they see it; ``right`` stands before the second."""

    service: Service
    left: VllmProcess
    right: ServingProxy
    seen: Path


@pytest.fixture(scope="module")
def external(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[External]:
    """Servers with the arguments that weft gives its own, started apart from it."""
    folder = tmp_path_factory.mktemp("external")
    data, seen = folder / "data", folder / "mounted-elsewhere"
    data.mkdir(mode=0o700)
    seen.symlink_to(data)
    settings = Settings(data_dir=data, vllm_replicas=2)
    facts = read_base_model_facts(BASE_NAME, tiny_model_dir, None)
    sources = vllm_sources(settings, facts, DataFolder(folder / "of-the-servers"), trains_here=True)
    first, second = (one.process_settings for one in sources if isinstance(one, ManagedVllm))
    with running_server(first) as left, running_server(second) as other, serving_proxy(other.base_url) as right:
        environment = {
            "WEFT_VLLM_URLS": json.dumps([f"{left.base_url}#left", f"{right.base_url}#right"]),
            "WEFT_VLLM_DATA_DIR": str(seen),
        }
        base_models = [f"{BASE_NAME}={tiny_model_dir}"]
        with ServiceProcess(data=data, base_models=base_models, environment=environment) as process:
            keys = make_tenant(data, "first"), make_tenant(data, "second")
            yield External(Service(process, data, tiny_model_dir, *keys), left, right, seen)


@pytest.fixture(scope="module")
def pair(external: External) -> Iterator[tuple[Speaker, Speaker]]:
    """Two tenants; what they say matters to nobody here."""
    service = external.service
    clients = [RawClient(service.base_url, key) for key in (service.key, service.other_key)]
    yield teach(clients[0], {MEOW: 2, WOOF: 3}), teach(clients[1], {MEOW: 4})
    for client in clients:
        client.close()


def cards(external: External, replica: str) -> dict[str, str]:
    """Folders of the adapters on a server, by name, as the server has them."""
    if replica == "left":
        with unix_client(external.left.base_url.removeprefix("unix://")) as http:
            listed: Any = http.get("/v1/models").json()
    else:
        listed = httpx.get(f"{external.right.base_url}/v1/models", timeout=40).json()
    return {card["id"]: card["root"] for card in listed["data"] if card["parent"]}


def sampled_on_both(speaker: Speaker) -> set[str]:
    """Sample in new sessions, several at once, until both servers have drawn; return the tokens of all as text."""
    said: set[str] = set()
    drawn: set[str] = set()
    for number in itertools.count(100):
        samplers = [speaker.pinned(MEOW, 10 * number + place) for place in range(8)]
        streams = [speaker.stream(sampler=one, tokens=LONG) for one in samplers]
        said |= {str(stream.finish()["sequences"][0]["tokens"]) for stream in streams}
        drawn |= {name for stream in streams for name in speaker.report(stream)["replicas"]}
        if drawn == REPLICAS or number == 110:
            break
    assert drawn == REPLICAS
    return said


def test_servers_read_adapters_under_their_own_path(external: External, pair: tuple[Speaker, Speaker]) -> None:
    ours, theirs = (sampled_on_both(speaker) for speaker in pair)
    assert (len(ours), len(theirs)) == (1, 1)
    assert ours != theirs
    for replica in REPLICAS:
        folders = [Path(folder) for folder in cards(external, replica).values()]
        assert len(folders) >= 3
        assert all(external.seen in folder.parents for folder in folders)


def test_a_swap_that_one_server_refuses_changes_nothing_on_either(
    external: External, pair: tuple[Speaker, Speaker]
) -> None:
    cat, cow = pair
    sampled_on_both(cat)
    old = cat.says(MEOW)
    before = cat.stream(tokens=20).finish()["sequences"][0]["tokens"]
    beside, sample = cow.stream().until_tokens(3), cat.stream().until_tokens(5)
    external.right.refuses = True
    try:
        refused = cat.client.post(f"/adapters/{cat.run}/reload", path=cat.paths[WOOF])
    finally:
        external.right.refuses = False
    assert refused.status_code >= 500, refused.text
    assert refused.json()["code"] == "engine_failure"
    known = {replica: set(cards(external, replica)) for replica in REPLICAS}
    assert cat.stream(tokens=20).finish()["sequences"][0]["tokens"] == before
    sample.finish()
    assert set(sample.versions) == {old}
    assert beside.finish()
    assert cow.report(beside)["attempts"] == 1
    new = cat.says(WOOF)
    assert all(new not in names for names in known.values())
    assert all(new in cards(external, replica) for replica in REPLICAS)
