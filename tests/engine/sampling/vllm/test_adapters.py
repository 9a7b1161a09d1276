"""Adapter versions on a real vLLM server: loaded once, evicted, lost, refused."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import InvalidRequest
from engine.sampling.replica import AdapterVersion
from engine.sampling.vllm.adapters import LOAD, UNLOAD
from engine.sampling.vllm.http import VllmHttp
from engine.sampling.vllm.settings import VllmReplicaSettings
from tests.engine.sampling.conftest import Adapted, make_adapter
from tests.engine.sampling.drawing import GREEDY, Client
from tests.engine.sampling.vllm.conftest import MAX_RANK, SERVED, ask_server, assert_greedy, serving

PROMPT = [72, 101, 108, 108, 111]
SHORT = replace(GREEDY, max_tokens=6)
LONG = replace(GREEDY, max_tokens=1000)


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Number of POSTs to the server, by route and adapter."""
    counted: Counter[tuple[str, str]] = Counter()
    post = VllmHttp.post

    async def counting(self: VllmHttp, path: str, body: Any, deadline_s: float | None) -> Any:
        counted[path, (body or {}).get("lora_name", "")] += 1
        return await post(self, path, body, deadline_s)

    monkeypatch.setattr(VllmHttp, "post", counting)
    return counted


@pytest.fixture
def version(world: Any) -> Callable[..., Adapted]:
    """``version(name, who)``: another version with the weights of ``who``."""
    return lambda name, who: replace(who, version=AdapterVersion(name, who.version.directory))


def listed(settings: VllmReplicaSettings) -> set[str]:
    answer = ask_server(settings, "GET", "/v1/models").json()
    return {card["id"] for card in answer["data"]} - {SERVED}


def forget(settings: VllmReplicaSettings, name: str) -> None:
    """Unload behind the replica's back."""
    ask_server(settings, "POST", "/v1/unload_lora_adapter", {"lora_name": name}).raise_for_status()


def add(settings: VllmReplicaSettings, version: AdapterVersion) -> None:
    """Load behind the replica's back."""
    body = {"lora_name": version.name, "lora_path": str(version.directory)}
    ask_server(settings, "POST", "/v1/load_lora_adapter", body).raise_for_status()


async def test_many_ask_and_one_load_is_made(client: Client, version: Any, world: Any, posts: Any) -> None:
    cat = version("single", world.cat)
    await asyncio.gather(*(client.ask(PROMPT, cat, SHORT) for _ in range(6)), client.replica.load(cat.version))
    assert posts[LOAD, "single"] == 1


async def test_the_least_recently_used_leaves_and_comes_back(
    settings: VllmReplicaSettings, version: Any, world: Any, posts: Any
) -> None:
    one, two, three = (version(f"lru-{number}", who) for number, who in enumerate((world.cat, world.dog, world.cat)))
    async with serving(replace(settings, max_resident=2)) as client:
        for who in (one, two, one, three):
            assert_greedy((await client.ask(PROMPT, who, SHORT)).only, who, PROMPT, 6)
        assert (await client.replica.health()).adapters == ("lru-0", "lru-2")
        assert {name for name in listed(settings) if name.startswith("lru")} == {"lru-0", "lru-2"}
        assert_greedy((await client.ask(PROMPT, two, SHORT)).only, world.dog, PROMPT, 6)
        assert posts[LOAD, "lru-1"] == 2


async def test_a_version_in_use_does_not_leave(settings: VllmReplicaSettings, version: Any, world: Any) -> None:
    busy, idle, late, later = (version(f"use-{number}", world.cat) for number in range(4))
    async with serving(replace(settings, max_resident=2)) as client:
        running = client.start(PROMPT, busy, LONG)
        await running.reached(1)
        await client.ask(PROMPT, idle, SHORT)
        other = client.start(PROMPT, late, LONG)
        await other.reached(1)
        assert (await client.replica.health()).adapters == ("use-0", "use-2")
        # No room: it waits until one of the two has ended, and can be cut while it does.
        waiting = client.start(PROMPT, later, SHORT)
        cut = client.start(PROMPT, idle, SHORT)
        await cut.cut_at_once()
        assert (await cut.end()).only.reason == "cut"
        assert (await client.replica.health()).waiting == 1
        assert_greedy((await waiting.end()).only, world.cat, PROMPT, 6)
        for one in (running, other):
            assert_greedy((await one.end()).only, world.cat, PROMPT, 1000)


async def test_unloaded_in_use_and_used_again(
    client: Client, settings: VllmReplicaSettings, version: Any, world: Any, posts: Any
) -> None:
    cat = version("in-use", world.cat)
    running = client.start(PROMPT, cat, LONG)
    await running.reached(1)
    await client.replica.unload("in-use")
    assert (await client.replica.health()).adapters == ()
    assert_greedy((await client.ask(PROMPT, cat, SHORT)).only, world.cat, PROMPT, 6)
    assert_greedy((await running.end()).only, world.cat, PROMPT, 1000)
    await client.replica.unload("in-use")
    assert "in-use" not in listed(settings)
    assert posts[UNLOAD, "in-use"] == 1


async def test_what_the_server_lost_is_loaded_again_once(
    client: Client, settings: VllmReplicaSettings, version: Any, world: Any, posts: Any
) -> None:
    cat = version("lost", world.cat)
    await client.replica.load(cat.version)
    forget(settings, "lost")
    forget(settings, "weft:zero")
    outputs = await asyncio.gather(*(client.ask(PROMPT, who, SHORT) for who in (cat, cat, cat, world.bare)))
    for who, output in zip((cat, cat, cat, world.bare), outputs, strict=True):
        assert_greedy(output.only, who, PROMPT, 6)
    assert (posts[LOAD, "lost"], posts[LOAD, "weft:zero"]) == (2, 1)


async def test_a_name_stands_for_one_folder(
    client: Client, settings: VllmReplicaSettings, version: Any, world: Any
) -> None:
    await client.replica.load(version("same", world.cat).version)
    with pytest.raises(InvalidRequest, match="another folder"):
        await client.ask(PROMPT, version("same", world.dog), SHORT)


async def test_a_replica_takes_over_what_the_server_has(
    settings: VllmReplicaSettings, version: Any, world: Any
) -> None:
    """Another weft's adapter of that name and folder, or one whose load's answer was lost."""
    cat = version("taken-over", world.cat)
    add(settings, cat.version)
    async with serving(settings) as client:
        assert_greedy((await client.ask(PROMPT, cat, SHORT)).only, world.cat, PROMPT, 6)


def broken(world: Any, folder: Path, change: Callable[[Path], None]) -> AdapterVersion:
    shutil.copytree(world.cat.version.directory, folder)
    change(folder)
    return AdapterVersion(folder.name, folder)


def poison(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[next(iter(tensors))].view(-1)[3] = torch.nan
    save_file({key: tensor.bfloat16() for key, tensor in tensors.items()}, file)


def truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def reshape(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({key: tensor[:, :-8].contiguous() for key, tensor in load_file(file).items() if "lora_A" in key}, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [(poison, "not finite"), (truncate, "damaged"), (reshape, "does not fit")],
)
async def test_an_adapter_that_would_harm_is_refused(
    client: Client, settings: VllmReplicaSettings, world: Any, tmp_path: Path, change: Any, message: str
) -> None:
    version = broken(world, tmp_path / change.__name__, change)
    with pytest.raises(InvalidRequest, match=message):
        await client.replica.load(version)
    assert version.name not in listed(settings)
    assert_greedy((await client.ask(PROMPT, world.cat, SHORT)).only, world.cat, PROMPT, 6)


async def test_a_rank_above_the_limit_is_refused(client: Client, world: Any, tmp_path: Path) -> None:
    high = make_adapter(world.base.facts.path, tmp_path / "high", "high", 5, MAX_RANK + 1, ("q_proj",))
    with pytest.raises(InvalidRequest, match=f"rank {MAX_RANK + 1}.*{MAX_RANK}"):
        await client.ask(PROMPT, high, SHORT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"served_model": "other"}, "weft/tiny.*other"),
        ({"max_lora_rank": 99}, "rank is 8 .*99"),
        ({"max_loras": 5}, "batch is 4 .*5"),
        ({"max_resident": 7}, "CPU LoRAs is 7 .*7 resident"),
        ({"max_logprobs": 21}, "logprobs is 20 .*21"),
        ({"head_adapters": False}, "modules is all .*lm_head"),
    ],
)
async def test_a_server_that_is_not_as_set_is_refused(
    settings: VllmReplicaSettings, changes: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        async with serving(replace(settings, **changes)):
            pass


async def test_a_context_longer_than_the_servers_is_refused(settings: VllmReplicaSettings) -> None:
    with pytest.raises(InvalidRequest, match=r"2049 .*4096"):
        async with serving(replace(settings, base=replace(settings.base, context_length=4096))):
            pass
