"""Aborts on a scripted server: what goes together, and what waits for nobody."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.sampling.background import Background
from engine.sampling.vllm_aborts import VllmAborts
from engine.sampling.vllm_http import VllmHttp
from tests.engine.sampling.vllm.scripted import ScriptedServer, scripted_server

SECONDS = 20.0


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as made:
        yield made


@pytest.fixture
async def aborts(server: ScriptedServer) -> AsyncIterator[VllmAborts]:
    http, background = VllmHttp("scripted", server.base_url, None, 4), Background()
    await http.open()
    yield VllmAborts(http, background, SECONDS)
    await background.close(SECONDS)
    await http.close()


async def test_aborts_for_readers_who_have_gone_go_with_the_next_that_somebody_waits_for(
    server: ScriptedServer, aborts: VllmAborts
) -> None:
    patient = [asyncio.create_task(aborts.ask(name, can_wait=True)) for name in ("left", "left too")]
    # They have asked.
    await asyncio.gather(*(asyncio.sleep(0) for _ in patient))
    assert server.aborted == []
    async with asyncio.timeout(SECONDS):
        await aborts.ask("cut")
        await asyncio.gather(*patient)
    assert server.aborted == [["left", "left too", "cut"]]


async def test_an_abort_that_can_wait_is_sent_all_the_same(server: ScriptedServer, aborts: VllmAborts) -> None:
    async with asyncio.timeout(SECONDS):
        await aborts.ask("left", can_wait=True)
        await aborts.ask("cut")
    assert server.aborted == [["left"], ["cut"]]
