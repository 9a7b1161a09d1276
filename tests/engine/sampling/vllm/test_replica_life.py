"""A server that sleeps, hangs and dies; it serves no heads, so prompts are scored in company. The last test kills it."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from contracts.errors import EngineFailure, InvalidRequest
from engine.sampling.replica import PromptScoring
from engine.sampling.vllm.process import VllmProcess
from engine.sampling.vllm.settings import VllmReplicaSettings
from tests.engine.sampling.drawing import GREEDY
from tests.engine.sampling.handshakes import handshake, shake_hands
from tests.engine.sampling.vllm.conftest import (
    ask_server,
    assert_greedy,
    process_settings,
    replica_settings,
    running_server,
    serving,
)

PROMPT = [72, 101, 108, 108, 111]
LONG = replace(GREEDY, max_tokens=1500)
KEY = "a key of the server"


@pytest.fixture(scope="module")
def server(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    folder = tmp_path_factory.mktemp("mortal")
    settings = process_settings(world, folder, head_adapters=False, api_key=KEY, stop_grace_s=3.0)
    with running_server(settings) as process:
        yield process


@pytest.fixture(scope="module")
def settings(world: Any, server: VllmProcess, tmp_path_factory: pytest.TempPathFactory) -> VllmReplicaSettings:
    found = replica_settings(world, server, tmp_path_factory.mktemp("mortal"))
    return replace(found, head_adapters=False, api_key=KEY)


@pytest.fixture(autouse=True)
def awake(settings: VllmReplicaSettings) -> Iterator[None]:
    """Ends a pause or sleep that a failed test has left behind."""
    yield
    for path in ("/resume", "/wake_up"):
        with suppress(httpx.HTTPError):
            ask_server(settings, "POST", path)


def test_its_engine_is_known_by_name_and_keeps_off_the_last_core(server: VllmProcess) -> None:
    """The first engine of the machine leaves the last core free, a later one does not; the front has every core."""
    everywhere = os.sched_getaffinity(0)
    found = list(psutil.process_iter(["cmdline", "cpu_affinity"]))
    engines = [process for process in found if (process.info["cmdline"] or [""])[0] == "VLLM::EngineCore"]
    (own,) = (engine for engine in engines if os.getpgid(engine.pid) == server.group)
    cores = set(own.info["cpu_affinity"])
    assert cores == everywhere - {max(everywhere)} or (cores == everywhere and len(engines) > 1)
    assert set(psutil.Process(server.group).cpu_affinity()) == everywhere


def test_no_other_user_of_the_machine_reaches_it(server: VllmProcess, settings: VllmReplicaSettings) -> None:
    """The server's routes run code and stop it, and an API key leaves some of them open. Torch has a store on loopback."""
    assert ask_server(settings, "GET", "/is_sleeping").status_code == 200
    own = [one for one in psutil.process_iter() if os.getpgid(one.pid) == server.group]
    found = [sock for one in own for sock in one.net_connections("inet") if sock.status == psutil.CONN_LISTEN]
    assert {sock.laddr.ip for sock in found} <= {"127.0.0.1", "::1"}


async def test_scores_in_company(settings: VllmReplicaSettings, world: Any) -> None:
    async with serving(settings) as client:
        beside = client.start(PROMPT, world.dog, replace(GREEDY, max_tokens=200))
        await beside.reached(1)
        asks = [client.ask(PROMPT, who, GREEDY, scoring=PromptScoring(1, True, 0)) for who in (world.bare, world.dog)]
        for who, drawn in zip((world.bare, world.dog), await asyncio.gather(*asks), strict=True):
            assert drawn.scored is not None
            assert drawn.scored.logprobs is not None
            np.testing.assert_allclose(drawn.scored.logprobs[1:], who.of_tokens(PROMPT[:1], PROMPT[1:]), atol=1e-5)
        assert not beside.task.done()
        assert_greedy((await beside.end()).only, world.dog, PROMPT, 200)


async def test_it_passes_the_handshake_with_scores_of_its_own(
    settings: VllmReplicaSettings, world: Any, tmp_path: Path
) -> None:
    async with serving(settings) as client, handshake(world, tmp_path, with_head=False) as made:
        await shake_hands(client.replica, made)


async def test_heads_are_refused(settings: VllmReplicaSettings, world: Any) -> None:
    """vLLM would drop the heads without an error."""
    async with serving(settings) as client:
        with pytest.raises(InvalidRequest, match="lm_head"):
            await client.ask(PROMPT, world.cat, GREEDY)
    with pytest.raises(InvalidRequest, match=r"modules with lm_head"):
        async with serving(replace(settings, head_adapters=True)):
            pass


async def test_the_key_is_needed(settings: VllmReplicaSettings) -> None:
    with pytest.raises(InvalidRequest, match="API key"):
        async with serving(replace(settings, api_key="another")):
            pass


async def test_a_sleep_cuts_what_runs_and_is_forgotten_after_waking(settings: VllmReplicaSettings, world: Any) -> None:
    """A sleep gives memory back where vLLM's platform can, which a CPU cannot."""
    async with serving(settings) as client:
        replica: Any = client.replica
        running = [client.start(PROMPT, who, LONG) for who in (world.dog, world.bare)]
        for one in running:
            await one.reached(5)
        await replica.sleep()
        ended = [(await one.end()).only for one in running]
        waiting = client.start(PROMPT, world.bare, GREEDY)
        cut = client.start(PROMPT, world.bare, GREEDY)
        await cut.cut_at_once()
        assert (await cut.end()).only.ids == []
        assert not waiting.task.done()
        assert (await client.replica.health()).alive
        await replica.wake_up()
        await replica.wake_up()
        waited = (await waiting.end()).only
        after = (await client.ask(PROMPT, world.dog, GREEDY)).only
    # Only now: what torch computes beside a busy engine takes its time, and the streams go on meanwhile.
    assert [sequence.reason for sequence in ended] == ["cut", "cut"]
    assert_greedy(waited, world.bare, PROMPT, 24)
    for sequence, who in zip((*ended, after), (world.dog, world.bare, world.dog), strict=True):
        assert_greedy(sequence, who, PROMPT)


@pytest.mark.parametrize("level", [1, 2])
async def test_a_server_that_sleeps_is_woken_and_shakes_hands(
    settings: VllmReplicaSettings, world: Any, tmp_path: Path, level: int
) -> None:
    """Level 2 drops the weights where vLLM's platform can, and the handshake tells; a CPU keeps them."""
    ask_server(settings, "POST", f"/sleep?level={level}").raise_for_status()
    hasty = replace(settings, start_deadline_s=30.0)
    async with serving(hasty) as client, handshake(world, tmp_path, with_head=False) as made:
        await shake_hands(client.replica, made)
        for who in (world.dog, world.bare):
            assert_greedy((await client.ask(PROMPT, who, GREEDY)).only, who, PROMPT, 24)


async def test_a_silent_server_that_is_paused_is_left_alone(settings: VllmReplicaSettings, world: Any) -> None:
    async with serving(replace(settings, probe_every_s=0.1, longest_silence_s=5.0)) as client:
        running = client.start(PROMPT, world.dog, GREEDY)
        await running.reached(1)
        ask_server(settings, "POST", "/pause?mode=keep&clear_cache=false").raise_for_status()
        done, _ = await asyncio.wait([running.task], timeout=7.0)
        assert not done
        ask_server(settings, "POST", "/resume").raise_for_status()
        assert_greedy((await running.end()).only, world.dog, PROMPT, 24)


def engine_of(server: VllmProcess) -> list[psutil.Process]:
    """The processes of the server other than the one that listens."""
    return psutil.Process(server.group).children(recursive=True)


async def test_an_engine_that_hangs_is_noticed_by_its_silence(
    settings: VllmReplicaSettings, server: VllmProcess, world: Any
) -> None:
    async with serving(replace(settings, probe_every_s=0.2, longest_silence_s=5.0, cut_deadline_s=5.0)) as client:
        running = client.start(PROMPT, world.dog, LONG)
        await running.reached(3)
        for process in engine_of(server):
            process.suspend()
        try:
            with pytest.raises(EngineFailure, match="makes no tokens"):
                await running.end()
        finally:
            for process in engine_of(server):
                process.resume()
        assert_greedy((await client.ask(PROMPT, world.dog, GREEDY)).only, world.dog, PROMPT, 24)


async def test_a_server_that_hangs(settings: VllmReplicaSettings, server: VllmProcess, world: Any) -> None:
    impatient = replace(settings, probe_every_s=0.2, health_deadline_s=5.0, cut_deadline_s=5.0)
    async with serving(impatient) as client:
        running, cut = (client.start(PROMPT, who, LONG) for who in (world.dog, world.bare))
        for one in (running, cut):
            await one.reached(3)
        os.kill(server.group, signal.SIGSTOP)
        try:
            assert not (await client.replica.health()).alive
            with pytest.raises(EngineFailure):
                await cut.cut()
            for one in (running, cut):
                with pytest.raises(EngineFailure):
                    await one.end()
        finally:
            os.kill(server.group, signal.SIGCONT)
        assert_greedy(running.drawn.only, world.dog, PROMPT)
        assert_greedy((await client.ask(PROMPT, world.dog, GREEDY)).only, world.dog, PROMPT, 24)
        assert (await client.replica.health()).alive


async def test_a_closed_replica_leaves_nothing_running(settings: VllmReplicaSettings, world: Any) -> None:
    async with serving(settings) as client:
        running = client.start(PROMPT, world.dog, LONG)
        await running.reached(1)
    with pytest.raises(EngineFailure, match="closed"):
        await running.end()
    with pytest.raises(EngineFailure, match="not running"):
        await client.ask(PROMPT, world.dog, GREEDY)
    async with serving(settings) as another:
        assert_greedy((await another.ask(PROMPT, world.dog, GREEDY)).only, world.dog, PROMPT, 24)


async def test_killed_in_the_middle(settings: VllmReplicaSettings, server: VllmProcess, world: Any) -> None:
    async with serving(settings) as client:
        endless = replace(GREEDY, max_tokens=1800)
        running = [client.start(PROMPT, who, endless) for who in (world.dog, world.bare, world.dog)]
        for one in running:
            await one.reached(3)
        left = engine_of(server)
        os.kill(server.group, signal.SIGKILL)
        for one, who in zip(running, (world.dog, world.bare, world.dog), strict=True):
            with pytest.raises(EngineFailure):
                await one.end()
            assert len(one.drawn.only.ids) >= 3
            assert_greedy(one.drawn.only, who, PROMPT)
        with pytest.raises(EngineFailure):
            await client.replica.load(replace(world.dog.version, name="later"))
        with pytest.raises(EngineFailure):
            await client.ask(PROMPT, world.dog, GREEDY)
        assert not (await client.replica.health()).alive
    assert await asyncio.to_thread(server_died, server)
    _, alive = await asyncio.to_thread(psutil.wait_procs, left, timeout=20)
    assert not alive


def server_died(server: VllmProcess) -> bool:
    """Within 20 s; its events belong to another event loop."""
    _, alive = psutil.wait_procs([psutil.Process(server.group)] if psutil.pid_exists(server.group) else [], timeout=20)
    return not alive
