"""The in-process replica against plain transformers and PEFT: tokens, logprobs, prompt scores, whatever the batch."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from contracts.errors import EngineFailure, InvalidRequest
from contracts.logit_rules import LogitRules
from contracts.operations import TopkLogprobs
from engine.model.base import BaseModel
from engine.sampling.in_process import batch, prefill
from engine.sampling.in_process.kv_cache import assemble
from engine.sampling.replica import PromptScoring
from tests.engine.sampling.drawing import GREEDY, RANDOM, Drawn, DrawnSequence, Running

PROMPTS = [[72, 101, 108, 108, 111], [7], list(range(40, 90)), [250, 3, 17, 200, 5, 5, 5, 9]]
TOLERANCE = 1e-4


def assert_same(left: DrawnSequence, right: DrawnSequence) -> None:
    assert left.ids == right.ids
    assert left.reason == right.reason
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("cells", [prefill.MAX_CELLS, 24])
def test_each_adapter_and_the_base_in_one_batch_equal_transformers(
    world: Any, serve: Any, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few cells cut the prompts into chunks, some of which hold nothing but padding in the shorter rows.
    monkeypatch.setattr(prefill, "MAX_CELLS", cells)

    async def task(client: Any) -> list[Drawn]:
        asks = [client.ask(prompt, who, GREEDY) for prompt in PROMPTS for who in world.everyone]
        return await asyncio.gather(*asks)

    outputs = iter(serve(world.base, task))
    for prompt in PROMPTS:
        for who in world.everyone:
            sequence = next(outputs).only
            assert sequence.ids == who.greedy(prompt, 24)
            assert sequence.reason == "length"
            np.testing.assert_allclose(sequence.logprobs, who.of_tokens(prompt, sequence.ids), atol=TOLERANCE)


def test_company_changes_nothing(world: Any, serve: Any) -> None:
    params = replace(RANDOM, max_tokens=10, seeds=(11, 12))

    async def alone(client: Any) -> list[Drawn]:
        return [await client.ask(prompt, who, params) for prompt in PROMPTS for who in world.everyone]

    async def together(client: Any) -> list[Drawn]:
        other = replace(RANDOM, max_tokens=7, temperature=2.0, top_k=5, seeds=(None,) * 3)
        crowd = [client.ask(prompt[::-1], who, other) for prompt in PROMPTS for who in world.everyone]
        mine = [client.ask(prompt, who, params) for prompt in PROMPTS for who in world.everyone]
        return list(await asyncio.gather(*crowd, *mine))[len(crowd) :]

    expected = serve(world.base, alone)
    for limits in ({}, {"max_sequences": 5}, {"cache_bytes": 1}):
        for one, other in zip(expected, serve(world.base, together, **limits), strict=True):
            for left, right in zip(one.sequences, other.sequences, strict=True):
                assert_same(left, right)


def test_many_adapters_of_a_large_total_rank_take_the_segment_path(
    world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def task(client: Any) -> list[Drawn]:
        return await asyncio.gather(*(client.ask(PROMPTS[0], who, GREEDY) for who in world.everyone))

    monkeypatch.setattr("engine.sampling.in_process.forward_pass.MAX_STACKED_RANK", 1)
    for who, output in zip(world.everyone, serve(world.base, task), strict=True):
        assert output.only.ids == who.greedy(PROMPTS[0], 24)


def test_temperature_and_truncation_do_not_change_what_is_reported(world: Any, serve: Any) -> None:
    params = replace(RANDOM, temperature=1.7, top_k=40, top_p=0.8)
    sequence = serve(world.base, lambda client: client.ask(PROMPTS[0], world.cat, params)).only
    reference = world.cat.logprobs(PROMPTS[0], sequence.ids)[len(PROMPTS[0]) :]
    np.testing.assert_allclose(sequence.logprobs, reference[np.arange(24), sequence.ids], atol=TOLERANCE)
    for token, row in zip(sequence.ids, reference, strict=True):
        assert (row > row[token]).sum() < 40


def test_more_samples_than_the_batch_holds(world: Any, serve: Any) -> None:
    eleven = replace(RANDOM, seeds=tuple(range(11)))

    async def task(client: Any) -> Drawn:
        output, _ = await asyncio.gather(
            client.ask(PROMPTS[2], world.dog, eleven, scoring=PromptScoring(1, True, 0)),
            client.ask(PROMPTS[0], world.cat, GREEDY),
        )
        return output

    small, large = serve(world.base, task, max_sequences=3), serve(world.base, task)
    assert len(small.sequences) == 11
    for left, right in zip(small.sequences, large.sequences, strict=True):
        assert_same(left, right)
    np.testing.assert_allclose(small.scored.logprobs, large.scored.logprobs, atol=TOLERANCE)


def test_the_context_may_be_filled_to_its_last_token(world: Any, serve: Any) -> None:
    context = world.base.facts.context_length
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, 256, context - 6)]
    sequence = serve(world.base, lambda client: client.ask(prompt, world.cat, replace(GREEDY, max_tokens=6))).only
    assert sequence.ids == world.cat.greedy(prompt, 6)
    assert sequence.reason == "length"


@pytest.mark.parametrize("last_n", [0, 1, 3, 50, 10_000])
def test_prompt_scores(world: Any, serve: Any, last_n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_SCORED_LOGITS", 320 * 7)  # several chunks, even for these prompts
    one = replace(GREEDY, max_tokens=1)
    asked = [(p, who, PromptScoring(max(1, len(p) - last_n), True, 4)) for p in PROMPTS for who in world.everyone]

    async def task(client: Any) -> list[Drawn]:
        asks = [client.ask(prompt, who, one, scoring=scoring) for prompt, who, scoring in asked]
        asks.append(client.ask(PROMPTS[2], world.dog, one))
        return await asyncio.gather(*asks)

    *outputs, unasked = serve(world.base, task)
    assert unasked.scored is None
    for output, (prompt, who, scoring) in zip(outputs, asked, strict=True):
        table = who.logprobs(prompt, [])
        table = np.concatenate([table, np.zeros((1, table.shape[1]), np.float32)])[: len(prompt)]
        expected = table[np.arange(len(prompt)), prompt]
        expected[: scoring.start] = np.nan
        assert output.scored.logprobs.dtype == np.float32
        np.testing.assert_allclose(output.scored.logprobs, expected, atol=TOLERANCE)
        assert_topk(output.scored.topk, table, 4, scoring.start)


def assert_topk(topk: TopkLogprobs | None, table: np.ndarray, k: int, start: int) -> None:
    assert topk is not None
    assert topk.token_ids.shape == topk.logprobs.shape == (len(table), k)
    assert (topk.token_ids.dtype, topk.logprobs.dtype) == (np.int32, np.float32)
    assert (topk.token_ids[:start] == 0).all()
    assert (topk.logprobs[:start] == np.float32(-99999.0)).all()
    likeliest = -np.sort(-table[start:], axis=1)[:, :k]
    np.testing.assert_allclose(topk.logprobs[start:], likeliest, atol=TOLERANCE)
    rows = np.arange(start, len(table))[:, None]
    np.testing.assert_allclose(table[rows, topk.token_ids[start:]], likeliest, atol=TOLERANCE)


def test_topk_of_samples(world: Any, serve: Any) -> None:
    async def task(client: Any) -> list[Drawn]:
        return await asyncio.gather(
            client.ask(PROMPTS[0], world.cat, replace(RANDOM, seeds=(1, 2)), topk=3),
            client.ask(PROMPTS[1], world.dog, RANDOM, topk=1000),
            client.ask(PROMPTS[1], world.bare, RANDOM),
        )

    few, all_of_them, none = serve(world.base, task)
    assert none.only.topk is None
    for sequence in few.sequences:
        table = world.cat.logprobs(PROMPTS[0], sequence.ids)[len(PROMPTS[0]) :]
        assert_topk(sequence.topk, table, 3, 0)
    topk = all_of_them.only.topk
    assert topk is not None
    vocabulary = world.base.facts.vocabulary_size
    assert topk.token_ids.shape == (24, vocabulary)
    assert (np.sort(topk.token_ids) == np.arange(vocabulary)).all()


def tiny_gpt2() -> PreTrainedModel:
    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2)
    )


def tiny_gemma3() -> PreTrainedModel:
    """Sliding-window layers, tied embeddings."""
    torch.manual_seed(4)
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return Gemma3ForCausalLM(config)


@pytest.mark.parametrize(
    ("make_model", "targets"),
    [(tiny_gpt2, ("c_attn", "c_fc", "c_proj")), (tiny_gemma3, ("q_proj", "v_proj", "down_proj"))],
)
def test_other_architectures(
    make_model: Callable[[], PreTrainedModel], targets: tuple[str, ...], make_world: Any, serve: Any
) -> None:
    world = make_world(make_model(), targets)
    prompts = [[5, 6, 7], [9], list(range(30))]
    scoring = PromptScoring(1, True, 0)

    async def task(client: Any) -> list[Drawn]:
        asks = [client.ask(p, who, GREEDY, scoring=scoring) for p in prompts for who in world.everyone]
        return await asyncio.gather(*asks)

    for output, (prompt, who) in zip(
        serve(world.base, task), [(p, w) for p in prompts for w in world.everyone], strict=True
    ):
        tokens = output.only.ids
        assert tokens == who.greedy(prompt, 24)
        np.testing.assert_allclose(output.only.logprobs, who.of_tokens(prompt, tokens), atol=TOLERANCE)
        table = who.logprobs(prompt, [0])
        np.testing.assert_allclose(
            output.scored.logprobs[1:], table[np.arange(1, len(prompt)), prompt[1:]], atol=TOLERANCE
        )


BAD_REQUESTS = [
    ([], replace(GREEDY, max_tokens=1), "prompt"),
    ([320], replace(GREEDY, max_tokens=1), "prompt"),
    ([-1], replace(GREEDY, max_tokens=1), "prompt"),
    ([1], replace(GREEDY, max_tokens=0), "max_tokens"),
    ([1], replace(GREEDY, max_tokens=2049), "max_tokens"),
    ([1] * 2049, replace(GREEDY, max_tokens=1), "context"),
    ([1], replace(GREEDY, temperature=-1), "temperature"),
    ([1], replace(GREEDY, temperature=float("nan")), "temperature"),
    ([1], replace(GREEDY, top_p=0), "top_p"),
    ([1], replace(GREEDY, seeds=()), "seeds"),
]


def test_bad_requests_name_the_field(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        for prompt, draw, field in BAD_REQUESTS:
            with pytest.raises(InvalidRequest, match=field):
                await client.ask(prompt, world.bare, draw)
        with pytest.raises(InvalidRequest, match="scoring"):
            await client.ask([1, 2], world.bare, GREEDY, scoring=PromptScoring(0, True, 0))
        with pytest.raises(InvalidRequest, match="topk"):
            await client.ask([1, 2], world.bare, GREEDY, topk=-1)
        ruled = replace(client.request([1], world.bare, GREEDY), logit_rules=LogitRules(frequency_penalty=1.0))
        with pytest.raises(InvalidRequest, match="penalties"):
            await Running(client.replica, ruled).end()

    serve(world.base, task)


def test_logits_that_are_not_numbers_fail_their_request_alone(world: Any, serve: Any) -> None:
    base = BaseModel.load(world.base.facts, dtype="float32", device="cpu")
    base.model.get_input_embeddings().weight[7] = torch.nan

    async def task(client: Any) -> list[Any]:
        asks = [
            client.ask([7, 8], world.bare, GREEDY),
            client.ask([8, 7], world.bare, GREEDY, scoring=PromptScoring(1, True, 0)),
            client.ask([9, 10, 11], world.bare, replace(GREEDY, max_tokens=3)),
        ]
        return await asyncio.gather(*asks, return_exceptions=True)

    sampled, scored, fine = serve(base, task)
    assert isinstance(sampled, EngineFailure)
    assert isinstance(scored, EngineFailure)
    assert fine.only.ids == world.bare.greedy([9, 10, 11], 3)


def test_a_sequence_takes_the_row_of_one_that_has_ended_without_a_copy_of_the_batch(
    world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that come and go beside a crowd are drawn as alone, and so is the crowd."""
    copies = 0

    def counted(*inputs: Any) -> Any:
        nonlocal copies
        copies += 1
        return assemble(*inputs)

    monkeypatch.setattr(batch, "assemble", counted)
    crowd = replace(GREEDY, max_tokens=1500, seeds=(None,) * 16, owner="tenant")
    comers = [(prompt, who) for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[3]) for who in world.everyone]

    async def task(client: Any) -> tuple[Drawn, list[Drawn]]:
        running = client.start(PROMPTS[2], world.cat, crowd)
        await running.reached(1)
        draw = replace(GREEDY, max_tokens=6, owner="tenant")
        drawn = [await client.ask(prompt, who, draw) for prompt, who in comers]
        assert await running.cut()
        await running.end()
        return running.drawn, drawn

    many, few = serve(world.base, task)
    for (prompt, who), drawn in zip(comers, few, strict=True):
        assert drawn.only.ids == who.greedy(prompt, 6)
    expected = world.cat.greedy(PROMPTS[2], max(len(sequence.ids) for sequence in many.sequences))
    assert all(sequence.ids == expected[: len(sequence.ids)] for sequence in many.sequences)
    # Two for the crowd, whose first sequence shows what a token takes, and one for the row that the others take in turns.
    assert copies == 3


def test_owners_that_decode_apart_and_come_together_again_draw_as_alone(
    world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence leaves the batch for one of its own when a crowd comes, and the crowd joins what it leaves behind."""
    rows: list[int] = []

    def counted(parts: Any, columns: int) -> Any:
        rows.append(sum(len(part.source) for part in parts))
        return assemble(parts, columns)

    monkeypatch.setattr(batch, "assemble", counted)
    crowd = replace(RANDOM, max_tokens=1500, seeds=tuple(range(16)), owner="many")
    light = replace(RANDOM, max_tokens=400, seeds=(3, 4), owner="few")

    async def alone(client: Any) -> Drawn:
        return await client.ask(PROMPTS[0], world.dog, light)

    async def beside(client: Any) -> tuple[Drawn, Drawn]:
        mine = client.start(PROMPTS[0], world.dog, light)
        await mine.reached(5)
        others = client.start(PROMPTS[2], world.cat, crowd)
        await others.reached(5)
        await mine.reached(60)
        assert await others.cut()
        return await mine.end(), await others.end()

    async def crowd_alone(client: Any) -> Drawn:
        running = client.start(PROMPTS[2], world.cat, crowd)
        await running.reached(200)
        assert await running.cut()
        return await running.end()

    mine, others = serve(world.base, beside)
    for left, right in zip(mine.sequences, serve(world.base, alone).sequences, strict=True):
        assert_same(left, right)
    for left, right in zip(others.sequences, serve(world.base, crowd_alone).sequences, strict=True):
        both = min(len(left.ids), len(right.ids))
        assert left.ids[:both] == right.ids[:both]
    # The crowd and the light owner were never copied into one batch.
    assert not {17, 18} & set(rows)
