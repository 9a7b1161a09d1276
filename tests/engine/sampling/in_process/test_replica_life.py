"""Life of a request on the in-process replica: late arrival, cut and failure; adapters loaded, evicted and refused."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import EngineFailure, InvalidRequest
from engine.model.adapter_folder import read_lora_weights
from engine.model.lora import LoraWeights
from engine.sampling.in_process import prefill
from engine.sampling.in_process.replica import TorchReplica
from engine.sampling.replica import AdapterVersion, PromptScoring, SamplerReplica
from tests.engine.sampling.drawing import GREEDY, Running

PROMPT = [72, 101, 108, 108, 111]
SHORT = replace(GREEDY, max_tokens=6)
LONG = replace(GREEDY, max_tokens=1500)


async def in_progress(client: Any, world: Any) -> Running:
    """A long request that certainly decodes."""
    running: Running = client.start(PROMPT, world.cat, LONG)
    await running.reached(1)
    return running


class Barrier:
    """Point at which the worker's thread stops until the test opens it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, *_: Any) -> None:
        """Stop the worker's thread here."""
        self._reached.set()
        assert self._open.wait(30)

    async def reached(self) -> None:
        """Wait until the worker is here."""
        assert await asyncio.to_thread(self._reached.wait, 30)

    def open(self) -> None:
        """Let it and all after it pass."""
        self._open.set()


def test_it_is_a_sampler_replica(world: Any) -> None:
    replica: SamplerReplica = TorchReplica(world.base)
    asyncio.run(replica.close())


def test_late_joiners_do_not_wait_for_a_long_one(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        running = await in_progress(client, world)
        for who in world.everyone:
            output = await client.ask(PROMPT, who, SHORT)
            assert output.only.ids == who.greedy(PROMPT, 6)
        assert not running.task.done()
        assert (await client.replica.health()).running == 1
        await running.leave()

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
        await client.ask(PROMPT, who, replace(SHORT, seeds=(None, None)))
        done.append(who.version.name)

    async def task(client: Any) -> None:
        await client.replica.load(world.dog.version)
        await asyncio.gather(*(ask(client, who) for who in [world.cat] * 8 + [world.dog]))

    serve(world.base, task, max_sequences=2)
    assert done.index("dog") <= 3


def test_one_prompts_many_sequences_leave_room_for_another_tenant(world: Any, serve: Any) -> None:
    """The neighbour is served at once and again and again, although the flood's sequences fill the batch for long."""

    expected = world.cat.greedy(PROMPT, 6)

    async def task(client: Any) -> None:
        crowd = replace(LONG, max_tokens=400, seeds=(None,) * 64, owner="flood")
        flood = client.start(PROMPT, world.cat, crowd)
        await flood.reached(1, 3)
        light = replace(SHORT, owner="light")
        for _ in range(3):
            assert (await client.ask(PROMPT, world.cat, light)).only.ids == expected
        assert not any(sequence.reason for sequence in flood.drawn.sequences)
        assert (await client.replica.health()).running == 4
        await flood.leave()

    serve(world.base, task, max_sequences=4)


def test_cancelling_the_caller_frees_its_place(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        running = await in_progress(client, world)
        await running.leave()
        again = Running(client.replica, replace(running.request, max_tokens=6))
        assert (await again.end()).only.ids == world.cat.greedy(PROMPT, 6)

    serve(world.base, task, max_sequences=1)


def test_cut_while_the_adapter_loads(world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = Barrier()

    def read(*inputs: Any) -> LoraWeights:
        barrier()
        return read_lora_weights(*inputs)

    monkeypatch.setattr("engine.sampling.in_process.replica.read_lora_weights", read)

    async def task(client: Any) -> None:
        running = client.start(PROMPT, world.cat, SHORT)
        await barrier.reached()
        assert await running.cut()
        assert (await running.end()).only.reason == "cut"
        assert running.drawn.only.ids == []
        barrier.open()
        output = await client.ask(PROMPT, world.cat, SHORT)
        assert output.only.ids == world.cat.greedy(PROMPT, 6)

    serve(world.base, task)


def test_cut_while_the_prompt_is_read(world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_CELLS", 4)
    barrier = Barrier()

    async def task(client: Any) -> None:
        handle = world.base.model.register_forward_pre_hook(barrier)
        two = replace(SHORT, seeds=(None, None))
        running = client.start(PROMPT, world.cat, two, scoring=PromptScoring(1, True, 0))
        await barrier.reached()
        cut = asyncio.create_task(running.cut())
        one = client.start(PROMPT, world.dog, two)
        cut_of_one = asyncio.create_task(one.cut_at_once(0))
        # After the first steps of the tasks above, which hand both cuts to the worker.
        asyncio.get_running_loop().call_soon(barrier.open)
        assert await cut
        handle.remove()
        drawn = await running.end()
        assert [(sequence.ids, sequence.reason) for sequence in drawn.sequences] == [([], "cut")] * 2
        assert drawn.scored is None
        await cut_of_one
        first, second = (await one.end()).sequences
        assert (first.ids, first.reason) == ([], "cut")
        assert second.ids == world.dog.greedy(PROMPT, 6)

    serve(world.base, task)


def test_what_was_cut_is_in_no_later_forward(world: Any, serve: Any) -> None:
    rows: list[int] = []

    def note(_module: Any, _inputs: Any, named: dict[str, Any]) -> None:
        rows.append(len(named["input_ids"]))

    async def task(client: Any) -> None:
        running = client.start(PROMPT, world.cat, replace(LONG, seeds=(None,) * 3))
        await running.reached(1)
        handle = world.base.model.register_forward_pre_hook(note, with_kwargs=True)
        assert await running.cut(1)
        at_cut, length = len(rows), len(running.drawn.sequences[0].ids)
        await running.reached(length + 5, index=0)
        handle.remove()
        assert await running.cut()
        assert (await client.replica.health()).running == 0
        await running.end()
        # One forward may have begun between the cut and the look at it; it has two rows already.
        assert set(rows[at_cut:]) == {2}

    serve(world.base, task)


def test_events_of_a_turn_go_over_together(world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def task(client: Any) -> None:
        calls = 0
        loop = asyncio.get_running_loop()
        original = loop.call_soon_threadsafe

        def counted(*inputs: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*inputs, **named)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        draw = replace(SHORT, max_tokens=64, seeds=(None,) * 4)
        await asyncio.gather(*(client.ask(PROMPT, who, draw) for who in world.everyone))
        monkeypatch.undo()
        # 64 tokens each: a call a turn, and a few for prompts that came late.
        assert calls <= 64 + 8

    serve(world.base, task)


def test_a_sequence_that_is_not_there_cannot_be_cut(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        running = await in_progress(client, world)
        with pytest.raises(InvalidRequest, match="no sequence 1"):
            await running.cut(1)
        await running.leave()

    serve(world.base, task)


def test_the_same_request_twice_at_once_is_refused(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        running = await in_progress(client, world)
        with pytest.raises(EngineFailure, match="already"):
            await Running(client.replica, running.request).end()
        await running.leave()

    serve(world.base, task)


def test_close_fails_what_is_outstanding(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        running = await in_progress(client, world)
        await client.replica.close()
        with pytest.raises(EngineFailure, match="closed"):
            await running.end()
        assert not await client.replica.cut(running.request.request_id)
        with pytest.raises(EngineFailure, match="not running"):
            await client.ask(PROMPT, world.bare, SHORT)
        assert not (await client.replica.health()).alive

    serve(world.base, task)


def test_a_cut_does_not_outlast_the_replica(world: Any, serve: Any) -> None:
    barrier = Barrier()

    async def task(client: Any) -> None:
        running = await in_progress(client, world)
        handle = world.base.model.register_forward_pre_hook(barrier)
        await barrier.reached()
        cut = asyncio.create_task(running.cut())
        closing = asyncio.create_task(client.replica.close())
        await asyncio.sleep(0)
        barrier.open()
        await closing
        handle.remove()
        # Whichever the worker saw first; what counts is that both have an end.
        ends = await asyncio.gather(cut, running.end(), return_exceptions=True)
        assert all(isinstance(end, EngineFailure) for end in ends) or ends[0] is True

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
    assert cat.only.ids == world.cat.greedy(PROMPT, 6)
    assert dog.only.ids == world.dog.greedy(PROMPT, 6)


def test_a_broken_step_fails_its_sequences_and_the_worker_lives_on(world: Any, serve: Any) -> None:
    broken = threading.Event()

    def fail_once(*_: Any) -> None:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("a secret path")

    async def task(client: Any) -> None:
        handle = world.base.model.register_forward_pre_hook(fail_once)
        try:
            running = await in_progress(client, world)
            broken.set()
            with pytest.raises(EngineFailure, match="failed") as caught:
                await running.end()
        finally:
            handle.remove()
        assert "secret" not in caught.value.message
        output = await client.ask(PROMPT, world.cat, SHORT)
        assert output.only.ids == world.cat.greedy(PROMPT, 6)

    serve(world.base, task)


def test_evicted_adapters_come_back_by_themselves(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        for _ in range(2):
            for who in (world.cat, world.dog):
                output = await client.ask(PROMPT, who, SHORT)
                assert output.only.ids == who.greedy(PROMPT, 6)
                assert (await client.replica.health()).adapters == (who.version.name,)
        both = await asyncio.gather(client.ask(PROMPT, world.cat, SHORT), client.ask(PROMPT, world.dog, SHORT))
        assert [o.only.ids for o in both] == [w.greedy(PROMPT, 6) for w in (world.cat, world.dog)]

    serve(world.base, task, max_adapters=1)


def test_load_and_unload(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        await client.replica.load(world.cat.version)
        await client.replica.load(world.dog.version)
        assert (await client.replica.health()).adapters == ("cat", "dog")
        running = await in_progress(client, world)
        await client.replica.unload("cat")
        await client.replica.unload("never loaded")
        assert (await client.replica.health()).adapters == ("dog",)
        assert not running.task.done()
        output = await client.ask(PROMPT, world.cat, SHORT)
        assert output.only.ids == world.cat.greedy(PROMPT, 6)
        await running.leave()

    serve(world.base, task)
