"""Requests that come late, are cut, or fail, and adapters that come and go."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.contracts.errors import EngineFailure, InvalidRequest
from engine.contracts.ids import RequestId
from engine.contracts.operations import LoraSettings, SamplingParams
from engine.sampling.adapter_store import AdapterStore
from engine.sampling.replica import AdapterVersion, SamplerReplica
from engine.sampling.torch_replica import TorchReplica
from engine.training.lora import LoraWeights

PROMPT = [72, 101, 108, 108, 111]
SHORT = SamplingParams(max_tokens=6, temperature=0, stop_tokens=[])
LONG = replace(SHORT, max_tokens=1500)


async def in_progress(client: Any, world: Any, params: SamplingParams = LONG) -> tuple[Any, asyncio.Task[Any]]:
    """A request that certainly decodes already: one submitted after it has come back."""
    request = client.request(PROMPT, world.cat, params)
    running = asyncio.create_task(client.replica.generate(request))
    await asyncio.sleep(0)
    await client.ask([1, 2], world.cat, SHORT)
    return request, running


def test_it_is_a_sampler_replica(world: Any) -> None:
    replica: SamplerReplica = TorchReplica(world.base)
    asyncio.run(replica.close())


def test_late_joiners_do_not_wait_for_a_long_one(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        request, running = await in_progress(client, world)
        for who in world.everyone:
            output = await client.ask(PROMPT, who, SHORT)
            assert output.sequences[0].tokens.tolist() == who.greedy(PROMPT, 6)
        assert not running.done()
        assert (await client.replica.health()).running == 1
        await client.replica.abort(request.request_id)
        await asyncio.wait([running])

    serve(world.base, task)


def test_concurrent_requests_share_forwards(world: Any, serve: Any) -> None:
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    async def task(client: Any) -> None:
        params = replace(SHORT, max_tokens=64)
        await asyncio.gather(*(client.ask(PROMPT, world.everyone[i % 3], params) for i in range(16)))

    handle = world.base.model.register_forward_pre_hook(count)
    serve(world.base, task)
    handle.remove()
    # 64 tokens each, and at most one more forward for every prompt and every turn that it came late.
    assert forwards <= 64 + 2 * 16


def test_one_adapter_cannot_keep_another_waiting(world: Any, serve: Any) -> None:
    done: list[str] = []

    async def ask(client: Any, who: Any) -> None:
        await client.ask(PROMPT, who, SHORT, n=2)
        done.append(who.version.name)

    async def task(client: Any) -> None:
        await client.replica.load(world.dog.version)
        await asyncio.gather(*(ask(client, who) for who in [world.cat] * 8 + [world.dog]))

    serve(world.base, task, max_sequences=2)
    assert done.index("dog") <= 3


def test_abort_cuts_only_its_request(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        request, running = await in_progress(client, world)
        other = asyncio.create_task(client.ask(PROMPT, world.dog, replace(SHORT, max_tokens=100)))
        await asyncio.sleep(0)
        assert await client.replica.abort(request.request_id)
        with pytest.raises(EngineFailure, match="aborted"):
            await running
        assert not await client.replica.abort(request.request_id)
        assert not await client.replica.abort(RequestId("unheard of"))
        assert (await other).sequences[0].tokens.tolist() == world.dog.greedy(PROMPT, 100)
        await client.ask(PROMPT, world.bare, SHORT)
        assert (await client.replica.health()).running == 0

    serve(world.base, task)


def test_cancelling_the_caller_frees_its_place(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        request, running = await in_progress(client, world)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        short = replace(request.sample, params=SHORT)
        output = await client.replica.generate(replace(request, sample=short))
        assert output.sequences[0].tokens.tolist() == world.cat.greedy(PROMPT, 6)

    serve(world.base, task, max_sequences=2)


def test_the_same_request_twice_at_once_is_refused(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        request, running = await in_progress(client, world)
        with pytest.raises(EngineFailure, match="already"):
            await client.replica.generate(request)
        await client.replica.abort(request.request_id)
        await asyncio.wait([running])

    serve(world.base, task)


def test_close_fails_what_is_outstanding(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        _, running = await in_progress(client, world)
        await client.replica.close()
        with pytest.raises(EngineFailure, match="closed"):
            await running
        with pytest.raises(EngineFailure, match="not running"):
            await client.ask(PROMPT, world.bare, SHORT)
        assert not (await client.replica.health()).alive

    serve(world.base, task)


def test_hooks_are_gone_after_close(world: Any, serve: Any) -> None:
    module = world.base.model.get_submodule(next(iter(world.base.projections)))
    before = len(module._forward_hooks)
    serve(world.base, lambda client: client.ask(PROMPT, world.cat, SHORT))
    assert len(module._forward_hooks) == before


def test_a_bad_adapter_fails_only_its_own(world: Any, serve: Any, tmp_path: Path) -> None:
    diverged = tmp_path / "diverged"
    diverged.mkdir()
    source: Path = world.cat.version.directory
    tensors = load_file(source / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, diverged / "adapter_model.safetensors")
    (diverged / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    absent = replace(world.cat, version=AdapterVersion("absent", tmp_path / "absent"))
    nan = replace(world.cat, version=AdapterVersion("nan", diverged))

    async def task(client: Any) -> list[Any]:
        asks = [client.ask(PROMPT, who, SHORT) for who in (absent, world.cat, nan, world.dog, absent)]
        results = await asyncio.gather(*asks, return_exceptions=True)
        with pytest.raises(InvalidRequest):
            await client.replica.load(absent.version)
        return results

    missing, cat, nonfinite, dog, missing_too = serve(world.base, task)
    assert isinstance(missing, InvalidRequest)
    assert isinstance(missing_too, InvalidRequest)
    assert str(tmp_path) not in str(missing)
    assert isinstance(nonfinite, InvalidRequest)
    assert cat.sequences[0].tokens.tolist() == world.cat.greedy(PROMPT, 6)
    assert dog.sequences[0].tokens.tolist() == world.dog.greedy(PROMPT, 6)


def test_a_broken_step_fails_its_sequences_and_the_worker_lives_on(world: Any, serve: Any) -> None:
    broken = threading.Event()

    def fail_once(*_: Any) -> None:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("a secret path")

    async def task(client: Any) -> None:
        handle = world.base.model.register_forward_pre_hook(fail_once)
        try:
            _, running = await in_progress(client, world)
            broken.set()
            with pytest.raises(EngineFailure, match="failed") as caught:
                await running
        finally:
            handle.remove()
        assert "secret" not in caught.value.message
        output = await client.ask(PROMPT, world.cat, SHORT)
        assert output.sequences[0].tokens.tolist() == world.cat.greedy(PROMPT, 6)

    serve(world.base, task)


def test_evicted_adapters_come_back_by_themselves(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        for _ in range(2):
            for who in (world.cat, world.dog):
                output = await client.ask(PROMPT, who, SHORT)
                assert output.sequences[0].tokens.tolist() == who.greedy(PROMPT, 6)
                assert (await client.replica.health()).adapters == (who.version.name,)
        both = await asyncio.gather(client.ask(PROMPT, world.cat, SHORT), client.ask(PROMPT, world.dog, SHORT))
        assert [o.sequences[0].tokens.tolist() for o in both] == [w.greedy(PROMPT, 6) for w in (world.cat, world.dog)]

    serve(world.base, task, max_adapters=1)


def test_load_and_unload(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        await client.replica.load(world.cat.version)
        await client.replica.load(world.dog.version)
        assert (await client.replica.health()).adapters == ("cat", "dog")
        request, running = await in_progress(client, world)
        await client.replica.unload("cat")
        await client.replica.unload("never loaded")
        assert (await client.replica.health()).adapters == ("dog",)
        assert not running.done()
        output = await client.ask(PROMPT, world.cat, SHORT)
        assert output.sequences[0].tokens.tolist() == world.cat.greedy(PROMPT, 6)
        await client.replica.abort(request.request_id)
        await asyncio.wait([running])

    serve(world.base, task)


def test_a_version_is_read_once_however_many_ask(world: Any) -> None:
    reads: list[str] = []
    may_read = threading.Event()
    weights = LoraWeights.initialise(world.base, LoraSettings(rank=2, seed=0))

    def read(version: AdapterVersion) -> LoraWeights:
        assert may_read.wait(30)
        reads.append(version.name)
        return weights

    store = AdapterStore(read, capacity=2)
    with ThreadPoolExecutor(8) as pool:
        leases = list(pool.map(lambda _: store.lease(AdapterVersion("a", Path("a"))), range(32)))
    may_read.set()
    assert all(lease.weights.result(30) is weights for lease in leases)
    assert reads == ["a"]
    store.close()


def test_held_versions_are_not_evicted_and_the_oldest_idle_one_is(world: Any) -> None:
    weights = LoraWeights.initialise(world.base, LoraSettings(rank=2, seed=0))
    store = AdapterStore(lambda _: weights, capacity=2)

    def lease(name: str) -> Any:
        return store.lease(AdapterVersion(name, Path(name)))

    a, b = lease("a"), lease("b")
    b.weights.result(30)
    c = lease("c")
    assert not c.weights.done()
    a.release()
    c.weights.result(30)
    assert store.names() == ("b", "c")
    waiting = lease("d")
    store.close()
    with pytest.raises(EngineFailure):
        waiting.weights.result(30)
    with pytest.raises(EngineFailure):
        lease("e")
