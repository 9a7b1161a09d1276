"""Answers of a broken vLLM server, scripted: each is an error of the request, never a wrong number. Needs no vLLM."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.sampling.replica import Ended, GenerateEvent, NewToken, PromptCached, PromptScoring
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.settings import VllmReplicaSettings
from tests.engine.sampling.drawing import GREEDY, Client
from tests.engine.sampling.vllm.scripted import GOOD, ScriptedServer, chunk, scripted_settings

PROMPT = [5, 1]
ERROR = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}
REFUSAL = {"error": {"message": "Token id 999 is out of vocabulary", "type": "BadRequestError", "code": 400}}
SCORING = PromptScoring(1, True, 0)


@pytest.fixture
def settings(scripted: ScriptedServer, world: Any, tmp_path: Path) -> VllmReplicaSettings:
    return replace(scripted_settings(scripted, world.base.facts, tmp_path), probe_every_s=0.1)


@pytest.fixture
async def client(settings: VllmReplicaSettings) -> AsyncIterator[Client]:
    replica = VllmReplica(settings)
    await replica.start()
    yield Client(replica)
    await replica.close()


async def failure(client: Client, world: Any, **asked: Any) -> tuple[WeftError, list[int]]:
    """The error of a request and the tokens that came before it."""
    running = client.start(PROMPT, world.bare, GREEDY, **asked)
    with pytest.raises(WeftError) as raised:
        await running.end()
    return raised.value, running.drawn.only.ids


CONFIG = {
    "model_config": {"max_logprobs": 20, "logprobs_mode": "raw_logprobs"},
    "lora_config": {"max_lora_rank": 8, "max_loras": 4, "max_cpu_loras": 5, "target_modules": ["q_proj"]},
}
"""Settings of a server in development mode that fits."""


@pytest.mark.parametrize(("device", "splits"), [("cpu", True), ("cpu", False), ("cuda", True)])
async def test_a_server_that_splits_prompts_on_a_cpu_is_refused(
    settings: VllmReplicaSettings, scripted: ScriptedServer, device: str, splits: bool
) -> None:
    scripted.config = CONFIG | {
        "scheduler_config": {"enable_chunked_prefill": splits},
        "device_config": {"device": device},
    }
    replica = VllmReplica(settings)
    if device == "cpu" and splits:
        with pytest.raises(InvalidRequest, match="--no-enable-chunked-prefill"):
            await replica.start()
    else:
        await replica.start()
    await replica.close()


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("0.31.2", "0.31.2 on the server, and should be 0.32 or later"),
        (None, "tells no version"),
        ("0.32.0rc1", None),
        ("1.0.0+cpu", None),
        ("dev", None),
    ],
)
async def test_a_server_of_an_older_version_is_refused(
    settings: VllmReplicaSettings, scripted: ScriptedServer, version: str | None, told: str | None
) -> None:
    scripted.version = version
    replica = VllmReplica(settings)
    if told is None:
        await replica.start()
    else:
        with pytest.raises(InvalidRequest, match=told):
            await replica.start()
    await replica.close()


@pytest.mark.parametrize(
    ("field", "told"),
    [("_api_process_count", "API server count is 2"), ("data_parallel_size", "data parallel size is 2")],
)
async def test_a_server_of_several_processes_or_engines_is_refused(
    settings: VllmReplicaSettings, scripted: ScriptedServer, field: str, told: str
) -> None:
    """An adapter is loaded in one of them only, and the others would fail or draw from another version."""
    scripted.config = CONFIG | {"parallel_config": {field: 2}}
    replica = VllmReplica(settings)
    with pytest.raises(InvalidRequest, match=told):
        await replica.start()
    await replica.close()


async def test_prompts_beyond_the_pace_wait_for_the_first_tokens_of_others(
    settings: VllmReplicaSettings, scripted: ScriptedServer, world: Any
) -> None:
    replica = VllmReplica(replace(settings, prompt_tokens=2 * len(PROMPT)))
    await replica.start()
    scripted.lines, scripted.hangs = (), True
    client = Client(replica)
    first = [client.start(PROMPT, world.bare, GREEDY) for _ in range(2)]
    await scripted.until_asked(PROMPT, 2)
    waiting = [client.start(PROMPT, world.bare, GREEDY) for _ in range(2)]
    await waiting[1].cut_at_once()
    assert (await waiting[1].end()).only.reason == "cut"
    assert scripted.asked(PROMPT) == 2
    scripted.lines, scripted.hangs = GOOD, False
    await first[0].leave()
    assert (await waiting[0].end()).only.ids == [1, 2, 3]
    await first[1].leave()
    await replica.close()


@pytest.mark.parametrize(("piece", "hangs"), [(1, False), (7, False), (10**6, False), (10**6, True)])
async def test_pieces_of_any_size(
    client: Client, scripted: ScriptedServer, world: Any, piece: int, hangs: bool
) -> None:
    scripted.piece, scripted.hangs = piece, hangs
    drawn = (await client.ask(PROMPT, world.bare, GREEDY)).only
    assert (drawn.ids, drawn.scores, drawn.reason) == ([1, 2, 3], [-1.5] * 3, "length")


@pytest.mark.parametrize(
    ("lines", "message", "tokens"),
    [
        ((chunk(1), chunk(2, logprob=None)), "missing or not finite", [1]),
        ((chunk(1), chunk(2, logprob=-9999.0)), "missing or not finite", [1]),
        ((chunk(1), {"choices": [{"token_ids": [2], "logprobs": None}]}), "without their logprobs", [1]),
        ((chunk(1), chunk(2), "[DONE]"), "broke off", [1, 2]),
        ((chunk(1),), "broke off", [1]),
        ((chunk(1), chunk(3, finish="length", end=3), "[DONE]"), "did not all arrive", [1, 3]),
        ((chunk(1), chunk(finish="length"), "[DONE]"), "did not all arrive", [1]),
        ((chunk(1), chunk(finish="abort", end=1), "[DONE]"), "by itself", [1]),
        ((chunk(1), ERROR, "[DONE]"), "failed while", [1]),
        ((chunk(1), "nonsense"), "does not understand", [1]),
    ],
)
async def test_a_stream_that_is_not_whole_is_a_failure(
    client: Client, scripted: ScriptedServer, world: Any, lines: Any, message: str, tokens: list[int]
) -> None:
    scripted.lines = lines
    error, came = await failure(client, world)
    assert isinstance(error, EngineFailure)
    assert message in error.message
    assert came == tokens
    scripted.lines = (chunk(4, finish="stop", end=1), "[DONE]")
    assert (await client.ask(PROMPT, world.bare, GREEDY)).only.ids == [4]


async def test_a_refusal_within_a_stream(client: Client, scripted: ScriptedServer, world: Any) -> None:
    scripted.lines = (REFUSAL, "[DONE]")
    error, _ = await failure(client, world)
    assert isinstance(error, InvalidRequest)
    assert "999" not in error.message


@pytest.mark.parametrize(("status", "kind"), [(400, InvalidRequest), (429, EngineFailure), (500, EngineFailure)])
async def test_a_status(client: Client, scripted: ScriptedServer, world: Any, status: int, kind: Any) -> None:
    scripted.status = status
    for asked in ({}, {"scoring": SCORING}):
        error, _ = await failure(client, world, **asked)
        assert type(error) is kind
        assert "scripted" not in error.message.replace("replica scripted", "")


async def test_an_adapter_that_is_always_lost(client: Client, scripted: ScriptedServer, world: Any) -> None:
    scripted.status = 404
    before = len(scripted.bodies)
    error, _ = await failure(client, world)
    assert "lost the adapter" in error.message
    assert len(scripted.bodies) == before + 2


@pytest.mark.parametrize("scores", [None, [None], [None, None], [None, {"2": {"logprob": -1.0}}], [None, {"1": {}}]])
async def test_a_prompt_that_is_not_scored(client: Client, scripted: ScriptedServer, world: Any, scores: Any) -> None:
    scripted.prompt_logprobs = scores
    error, tokens = await failure(client, world, scoring=SCORING)
    assert isinstance(error, EngineFailure)
    assert tokens == []


async def test_a_cut_that_is_not_confirmed(client: Client, scripted: ScriptedServer, world: Any) -> None:
    scripted.lines, scripted.hangs = (chunk(1),), True
    running = client.start(PROMPT, world.bare, replace(GREEDY, seeds=(None, None)))
    await running.reached(1)
    with pytest.raises(EngineFailure, match="did not confirm"):
        await running.cut(1)
    with pytest.raises(EngineFailure, match="did not confirm"):
        await running.end()
    assert ["generate-tokens-x"] in scripted.aborted
    # And the connection is closed, by which a server aborts as well.
    async with asyncio.timeout(60):
        await scripted.left.wait()


async def test_a_reader_that_leaves_after_the_last_token_aborts_nothing(
    client: Client, scripted: ScriptedServer, world: Any
) -> None:
    """The sequence has ended by itself, and the count that the server sends last comes with the tokens."""
    scripted.late_prompt = PROMPT
    scripted.late_lines = ({"usage": {"prompt_tokens_details": {"cached_tokens": 1}}}, "[DONE]")
    seen: list[GenerateEvent] = []

    async def read() -> None:
        async with aclosing(client.replica.generate(client.request(PROMPT, world.bare, GREEDY))) as batches:
            async for events in batches:
                seen.extend(events)
                if sum(isinstance(event, NewToken) for event in seen) == 3:
                    return

    async with asyncio.timeout(30):
        reading = asyncio.create_task(read())
        await scripted.until_asked(PROMPT, 1)
        # A neighbour's whole request: by then the reader has whatever it gets before the last lines.
        assert (await client.ask([7, 7], world.bare, GREEDY)).only.ids == [1, 2, 3]
        scripted.may_end.set()
        await reading
        await client.replica.close()
    assert PromptCached(1) in seen
    assert Ended(0, "length") in seen
    assert scripted.aborted == []


async def test_each_sequence_is_sent_under_an_id_of_its_own(
    client: Client, scripted: ScriptedServer, world: Any
) -> None:
    before = len(scripted.bodies)
    for _ in range(2):
        await client.ask(PROMPT, world.bare, replace(GREEDY, seeds=(None, 2**64 - 1, -1)))
    sent = scripted.bodies[before:]
    assert len({body["request_id"] for body in sent}) == 6
    assert [body["sampling_params"]["seed"] for body in sent[:3]] == [None, 2**63 - 1, 2**63 - 1]
    assert {body["model"] for body in sent} == {"weft:zero"}


@pytest.mark.parametrize(
    ("status", "message"), [(500, "status 500"), (404, "WEFT_VLLM_DATA_DIR"), (400, "something else")]
)
async def test_a_load_that_fails_can_be_tried_again(
    client: Client, scripted: ScriptedServer, world: Any, status: int, message: str
) -> None:
    scripted.load_answers = [status]
    headless = world.dog.version
    with pytest.raises(EngineFailure, match=message):
        await client.replica.load(headless)
    assert (await client.replica.health()).adapters == ()
    await client.replica.load(headless)
    assert (await client.replica.health()).adapters == ("dog",)


async def test_a_version_that_leaves_does_not_hold_up_the_next_where_there_is_a_spare_place(
    settings: VllmReplicaSettings, scripted: ScriptedServer, world: Any
) -> None:
    """Two that leave do, and nobody loads a version whose own unload is under way."""
    replica = VllmReplica(replace(settings, max_resident=1, spare_places=1))
    await replica.start()
    first, second, third = (replace(world.dog.version, name=f"v{number}") for number in range(3))
    await replica.load(first)
    scripted.may_unload.clear()
    async with asyncio.timeout(10):
        await replica.load(second)
    later = [asyncio.create_task(replica.load(version)) for version in (third, first)]
    await scripted.until_unloads(2)
    assert scripted.loaded[1:] == ["v0", "v1"]
    scripted.may_unload.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*later)
    # In either order: each is checked in a thread before it is loaded.
    assert sorted(scripted.loaded[3:]) == ["v0", "v2"]
    await replica.close()


async def test_a_server_without_development_mode(client: Client, scripted: ScriptedServer) -> None:
    scripted.operate_answers = [404]
    replica: Any = client.replica
    with pytest.raises(InvalidRequest, match="development mode"):
        await replica.sleep()


async def test_nobody_there(settings: VllmReplicaSettings) -> None:
    replica = VllmReplica(replace(settings, base_url="http://127.0.0.1:9"))
    with pytest.raises(EngineFailure, match="cannot be reached"):
        await replica.start()
    assert not (await replica.health()).alive
    await replica.close()


async def test_a_start_that_takes_too_long(settings: VllmReplicaSettings, scripted: ScriptedServer) -> None:
    scripted.warm_lines, scripted.hangs = (), True
    replica = VllmReplica(replace(settings, start_deadline_s=0.3))
    with pytest.raises(EngineFailure, match="in time"):
        await replica.start()
    await replica.close()
