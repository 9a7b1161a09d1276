"""Contract suite of ``SamplerReplica``, for every implementation. The adapters cat and dog and the bare base are the tenants."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.errors import InvalidRequest
from engine.sampling.replica import AdapterVersion, PromptScoring
from tests.engine.sampling.drawing import DEADLINE_S, GREEDY, Client, Drawn
from tests.engine.sampling.replicas import REPLICAS, SEQUENCES

PROMPT = [72, 101, 108, 108, 111]
LONG_PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, 256, 1000)]
SHORT = replace(GREEDY, max_tokens=6)
LONG = replace(GREEDY, max_tokens=900)
WARM = replace(GREEDY, temperature=2.0)
TOLERANCE = 1e-4  # to the reference
REPEATED = 1e-5  # to the same replica's own numbers


@pytest.fixture(params=REPLICAS)
async def client(request: pytest.FixtureRequest, world: Any) -> AsyncIterator[Client]:
    async with REPLICAS[request.param](world) as replica:
        yield Client(replica)


def full(draw: Any) -> Any:
    """``draw`` for as many sequences as the replica decodes at once."""
    return replace(draw, seeds=(None,) * SEQUENCES)


def ids(drawn: Drawn) -> list[list[int]]:
    return [sequence.ids for sequence in drawn.sequences]


async def test_greedy_equals_the_reference(world: Any, client: Client) -> None:
    outputs = await asyncio.gather(*(client.ask(PROMPT, who, GREEDY) for who in world.everyone))
    for who, output in zip(world.everyone, outputs, strict=True):
        assert output.only.ids == who.greedy(PROMPT, 24)
        assert output.only.reason == "length"
        np.testing.assert_allclose(output.only.logprobs, who.of_tokens(PROMPT, output.only.ids), atol=TOLERANCE)


async def test_each_sequence_has_its_own_seed(world: Any, client: Client) -> None:
    three = replace(WARM, seeds=(5, 6, 7))
    first, again = [await client.ask(PROMPT, world.cat, three) for _ in range(2)]
    alone = await client.ask(PROMPT, world.cat, replace(WARM, seeds=(6,)))
    fresh = await client.ask(PROMPT, world.cat, replace(WARM, seeds=(None,) * 3))
    assert ids(first) == ids(again)
    assert alone.only.ids == first.sequences[1].ids
    assert len({tuple(tokens) for tokens in ids(first) + ids(fresh)}) == 6
    for sequence in first.sequences:
        expected = world.cat.of_tokens(PROMPT, sequence.ids)
        np.testing.assert_allclose(sequence.logprobs, expected, atol=TOLERANCE)


async def test_a_stop_token_ends_a_sequence_and_stays_in_it(world: Any, client: Client) -> None:
    tokens = world.cat.greedy(PROMPT, 24)
    stop = tokens[9]
    drawn = await client.ask(PROMPT, world.cat, replace(GREEDY, stop_tokens=frozenset({stop})))
    assert drawn.only.ids == tokens[: tokens.index(stop) + 1]
    assert drawn.only.reason == "stop"


@pytest.mark.parametrize("length", [1, 2, 17])
async def test_max_tokens(world: Any, client: Client, length: int) -> None:
    drawn = await client.ask(PROMPT, world.dog, replace(GREEDY, max_tokens=length))
    assert drawn.only.ids == world.dog.greedy(PROMPT, length)
    assert drawn.only.reason == "length"


async def test_the_likeliest_tokens_come_with_each(world: Any, client: Client) -> None:
    sequence = (await client.ask(PROMPT, world.cat, replace(WARM, seeds=(1,)), topk=3)).only
    table = world.cat.logprobs(PROMPT, sequence.ids)[len(PROMPT) :]
    assert sequence.topk is not None
    assert (sequence.topk.token_ids.dtype, sequence.topk.logprobs.dtype) == (np.int32, np.float32)
    likeliest = -np.sort(-table, axis=1)[:, :3]
    np.testing.assert_allclose(sequence.topk.logprobs, likeliest, atol=TOLERANCE)
    found = np.take_along_axis(table, sequence.topk.token_ids.astype(np.int64), axis=1)
    np.testing.assert_allclose(found, likeliest, atol=TOLERANCE)


@pytest.mark.parametrize("start", [1, 3, 5])
async def test_the_prompt_is_scored_before_any_token(world: Any, client: Client, start: int) -> None:
    """``Drawn`` checks the order."""
    drawn = await client.ask(PROMPT, world.cat, SHORT, scoring=PromptScoring(start, True, 2))
    table = world.cat.logprobs(PROMPT, [0])[: len(PROMPT)]
    expected = table[np.arange(len(PROMPT)), PROMPT]
    expected[:start] = np.nan
    assert drawn.scored is not None
    assert drawn.scored.logprobs is not None
    assert drawn.scored.topk is not None
    np.testing.assert_allclose(drawn.scored.logprobs, expected, atol=TOLERANCE)
    likeliest = -np.sort(-table[start:], axis=1)[:, :2]
    np.testing.assert_allclose(drawn.scored.topk.logprobs[start:], likeliest, atol=TOLERANCE)
    assert drawn.only.ids == world.cat.greedy(PROMPT, 6)
    unasked = await client.ask(PROMPT, world.cat, SHORT, scoring=PromptScoring(start, True, 0))
    assert unasked.scored is not None
    assert unasked.scored.topk is None


@pytest.mark.parametrize("together", [1, 8])
async def test_cut_of_one_sequence_leaves_the_others_and_the_neighbour(
    world: Any, client: Client, together: int
) -> None:
    neighbour = client.start(PROMPT, world.dog, replace(GREEDY, max_tokens=100))
    draw = replace(LONG, max_tokens=150, seeds=(None,) * 3, tokens_at_a_time=together)
    running = client.start(PROMPT, world.cat, draw)
    await running.reached(3)
    assert await running.cut(1)
    first, second, third = (await running.end()).sequences
    expected = world.cat.greedy(PROMPT, 150)
    assert [first.ids, third.ids] == [expected, expected]
    assert [first.reason, second.reason, third.reason] == ["length", "cut", "length"]
    assert 3 <= len(second.ids) < 150
    assert second.ids == expected[: len(second.ids)]
    np.testing.assert_allclose(second.logprobs, world.cat.of_tokens(PROMPT, second.ids), atol=TOLERANCE)
    assert (await neighbour.end()).only.ids == world.dog.greedy(PROMPT, 100)


async def test_cut_of_all_leaves_the_neighbour(world: Any, client: Client) -> None:
    neighbour = client.start(PROMPT, world.dog, replace(GREEDY, max_tokens=100))
    running = client.start(PROMPT, world.cat, replace(LONG, seeds=(None,) * 2))
    await running.reached(3)
    await neighbour.reached(1)
    assert await running.cut()
    for sequence in (await running.end()).sequences:
        assert sequence.reason == "cut"
        assert sequence.ids == world.cat.greedy(PROMPT, len(sequence.ids))
    assert not await running.cut()
    assert (await neighbour.end()).only.ids == world.dog.greedy(PROMPT, 100)


async def test_every_token_comes_before_the_cut_is_confirmed(world: Any, client: Client) -> None:
    request = client.request(PROMPT, world.cat, LONG)
    drawn = Drawn.of(request)
    async with asyncio.timeout(DEADLINE_S), aclosing(client.replica.generate(request)) as batches:
        drawn.take(await anext(batches))
        assert await client.replica.cut(request.request_id)
        # The rest is there already: reading it needs no more from the replica.
        async for events in batches:
            drawn.take(events)
    assert drawn.only.reason == "cut"
    assert drawn.only.ids == world.cat.greedy(PROMPT, len(drawn.only.ids))


async def test_cut_while_the_prompt_is_read(world: Any, client: Client) -> None:
    neighbour = client.start(PROMPT, world.dog, GREEDY)
    running = client.start(LONG_PROMPT, world.cat, replace(LONG, seeds=(None, None)))
    await running.cut_at_once()
    assert [sequence.reason for sequence in (await running.end()).sequences] == ["cut", "cut"]
    assert (await neighbour.end()).only.ids == world.dog.greedy(PROMPT, 24)


async def test_cut_while_waiting_for_a_place(world: Any, client: Client) -> None:
    crowd = client.start(PROMPT, world.cat, full(LONG))
    await crowd.reached(1)
    waiting = client.start(PROMPT, world.dog, replace(SHORT, seeds=(None, None)))
    await waiting.cut_at_once()
    assert [(sequence.ids, sequence.reason) for sequence in (await waiting.end()).sequences] == [([], "cut")] * 2
    assert not crowd.task.done()
    await crowd.leave()
    assert (await client.ask(PROMPT, world.dog, SHORT)).only.ids == world.dog.greedy(PROMPT, 6)


@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("cuts", [1, 2, 5])
async def test_cut_and_gone_on_with_equals_uncut(world: Any, client: Client, cuts: int, together: int) -> None:
    length = 150
    whole = (await client.ask(PROMPT, world.cat, replace(GREEDY, max_tokens=length))).only
    tokens: list[int] = []
    logprobs: list[float] = []
    for segment in range(cuts + 1):
        draw = replace(GREEDY, max_tokens=length - len(tokens), tokens_at_a_time=together)
        running = client.start(PROMPT + tokens, world.cat, draw)
        if segment < cuts:
            await running.reached(segment + 1)
            await running.cut()
        drawn = (await running.end()).only
        tokens += drawn.ids
        logprobs += drawn.scores
        if len(tokens) == length:
            # On a busy machine it may end before the cut is asked for.
            break
    assert tokens == whole.ids
    np.testing.assert_allclose(logprobs, whole.logprobs, atol=REPEATED)


async def test_nothing_to_cut(client: Client) -> None:
    assert not await client.replica.cut("unheard of")
    assert not await client.replica.cut("unheard of", 0)


async def test_leaving_the_generator_aborts(world: Any, client: Client) -> None:
    request = client.request(PROMPT, world.cat, full(LONG))
    async with asyncio.timeout(DEADLINE_S), aclosing(client.replica.generate(request)) as batches:
        await anext(batches)
        waiting = client.start(PROMPT, world.dog, SHORT)
    assert not await client.replica.cut(request.request_id)
    # All places were taken for long: only what was left can have made room.
    assert (await waiting.end()).only.ids == world.dog.greedy(PROMPT, 6)


async def test_cancelling_the_reader_aborts(world: Any, client: Client) -> None:
    running = client.start(PROMPT, world.cat, full(LONG))
    await running.reached(1)
    waiting = client.start(PROMPT, world.dog, SHORT)
    await running.leave()
    assert (await waiting.end()).only.ids == world.dog.greedy(PROMPT, 6)


async def test_load_unload_and_load_again(world: Any, client: Client) -> None:
    replica = client.replica
    await replica.load(world.cat.version)
    await replica.load(world.cat.version)
    assert (await replica.health()).adapters == ("cat",)
    running = client.start(PROMPT, world.cat, replace(GREEDY, max_tokens=100))
    await running.reached(1)
    await replica.unload("cat")
    await replica.unload("never loaded")
    assert (await replica.health()).adapters == ()
    assert (await running.end()).only.ids == world.cat.greedy(PROMPT, 100)
    assert (await client.ask(PROMPT, world.cat, SHORT)).only.ids == world.cat.greedy(PROMPT, 6)
    assert (await replica.health()).adapters == ("cat",)


async def test_two_versions_side_by_side(world: Any, client: Client) -> None:
    old = replace(world.cat, version=AdapterVersion("run@1", world.cat.version.directory))
    new = replace(world.dog, version=AdapterVersion("run@2", world.dog.version.directory))
    outputs = await asyncio.gather(*(client.ask(PROMPT, who, GREEDY) for who in (old, new, old)))
    assert [output.only.ids for output in outputs] == [who.greedy(PROMPT, 24) for who in (old, new, old)]
    assert set((await client.replica.health()).adapters) == {"run@1", "run@2"}


async def test_a_bad_adapter_fails_its_own_request_only(world: Any, client: Client, tmp_path: Path) -> None:
    absent = replace(world.cat, version=AdapterVersion("absent", tmp_path / "absent"))
    missing, cat = await asyncio.gather(
        client.ask(PROMPT, absent, SHORT), client.ask(PROMPT, world.cat, SHORT), return_exceptions=True
    )
    assert isinstance(missing, InvalidRequest)
    assert str(tmp_path) not in missing.message
    assert isinstance(cat, Drawn)
    assert cat.only.ids == world.cat.greedy(PROMPT, 6)
    with pytest.raises(InvalidRequest):
        await client.replica.load(absent.version)


async def test_a_prompt_that_cannot_be_is_refused(world: Any, client: Client) -> None:
    facts = world.base.facts
    too_long = [1] * facts.context_length
    for prompt in (too_long, too_long[:-4], [facts.vocabulary_size], [-1], []):
        with pytest.raises(InvalidRequest, match="prompt"):
            await client.ask(prompt, world.bare, SHORT)
    assert (await client.ask(PROMPT, world.bare, SHORT)).only.ids == world.bare.greedy(PROMPT, 6)


async def test_a_prompt_of_the_whole_context_is_scored(world: Any, client: Client) -> None:
    """The prompt's last token has a logprob, too, though nothing more than one token can be drawn after it."""
    facts = world.base.facts
    prompt = np.random.default_rng(7).integers(0, 256, facts.context_length).tolist()
    last = PromptScoring(facts.context_length - 3, True, 0)
    drawn = await client.ask(prompt, world.bare, replace(SHORT, max_tokens=1), scoring=last)
    assert drawn.scored is not None
    places = np.arange(facts.context_length)[-3:]
    expected = world.bare.logprobs(prompt, [])[places, np.array(prompt)[places]]
    np.testing.assert_allclose(drawn.scored.logprobs[-3:], expected, atol=1e-4)
    assert len(drawn.only.ids) == 1
    with pytest.raises(InvalidRequest, match="prompt"):
        await client.ask(prompt, world.bare, replace(SHORT, max_tokens=2))


async def test_health(world: Any, client: Client) -> None:
    idle = await client.replica.health()
    assert (idle.alive, idle.running, idle.waiting) == (True, 0, 0)
    assert client.replica.name
    crowd = client.start(PROMPT, world.cat, full(LONG))
    await crowd.reached(1)
    waiting = client.start(PROMPT, world.dog, SHORT)
    busy = await client.replica.health()
    assert (busy.alive, busy.running) == (True, SEQUENCES)
    await crowd.leave()
    await waiting.end()
    await client.replica.close()
    await client.replica.close()
    assert not (await client.replica.health()).alive
