"""Aborts on a scripted server: those of one moment share a request."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from contracts.errors import EngineFailure
from engine.sampling.background_tasks import BackgroundTasks
from engine.sampling.vllm.aborts import VllmAborts
from engine.sampling.vllm.http import VllmHttp
from tests.engine.sampling.vllm.scripted import ScriptedServer

SECONDS = 60.0


@pytest.fixture
async def background() -> AsyncIterator[BackgroundTasks]:
    made = BackgroundTasks()
    yield made
    await made.close(SECONDS)


@pytest.fixture
async def aborts(scripted: ScriptedServer, background: BackgroundTasks) -> AsyncIterator[VllmAborts]:
    http = VllmHttp("scripted", scripted.base_url, None, 4)
    await http.open()
    yield VllmAborts(http, background, SECONDS)
    await http.close()


async def test_aborts_of_one_moment_share_a_request_and_a_later_one_has_its_own(
    scripted: ScriptedServer, aborts: VllmAborts
) -> None:
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*(aborts.ask(name) for name in ("left", "left too", "cut")))
        await aborts.ask("later")
    assert scripted.aborted == [["left", "left too", "cut"], ["later"]]


async def test_an_abort_that_a_closing_replica_does_not_send_is_a_failure(
    scripted: ScriptedServer, aborts: VllmAborts, background: BackgroundTasks
) -> None:
    asked = asyncio.create_task(aborts.ask("left"))
    await asyncio.sleep(0)
    await background.close(0)
    with pytest.raises(EngineFailure, match="before an abort was sent"):
        await asyncio.wait_for(asked, SECONDS)
    assert scripted.aborted == []
