"""The in-process replica against plain transformers and PEFT: tokens, logprobs, stops, prompt scores."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from engine.contracts.errors import EngineFailure, InvalidRequest
from engine.contracts.operations import SampledSequence, SampleOutput, SamplingParams, TopkLogprobs
from engine.sampling import prefill
from engine.training.base import BaseModel

PROMPTS = [[72, 101, 108, 108, 111], [7], list(range(40, 90)), [250, 3, 17, 200, 5, 5, 5, 9]]
GREEDY = SamplingParams(max_tokens=24, temperature=0, stop_tokens=[])
RANDOM = SamplingParams(max_tokens=24, seed=11, stop_tokens=[])
TOLERANCE = 1e-4


def only(output: SampleOutput) -> SampledSequence:
    (sequence,) = output.sequences
    return sequence


def assert_same(left: SampledSequence, right: SampledSequence) -> None:
    assert left.tokens.tolist() == right.tokens.tolist()
    assert left.stop_reason == right.stop_reason
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("cells", [prefill.MAX_CELLS, 24])
def test_each_adapter_and_the_base_in_one_batch_equal_transformers(
    world: Any, serve: Any, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few cells cut the prompts into chunks, some of which hold nothing but padding in the shorter rows.
    monkeypatch.setattr(prefill, "MAX_CELLS", cells)

    async def task(client: Any) -> list[SampleOutput]:
        asks = [client.ask(prompt, who, GREEDY) for prompt in PROMPTS for who in world.everyone]
        return await asyncio.gather(*asks)

    outputs = iter(serve(world.base, task))
    for prompt in PROMPTS:
        for who in world.everyone:
            sequence = only(next(outputs))
            assert sequence.tokens.tolist() == who.greedy(prompt, 24)
            assert sequence.tokens.dtype == np.int32
            assert sequence.logprobs.dtype == np.float32
            assert sequence.stop_reason == "length"
            np.testing.assert_allclose(
                sequence.logprobs, who.of_tokens(prompt, sequence.tokens.tolist()), atol=TOLERANCE
            )


def test_company_changes_nothing(world: Any, serve: Any) -> None:
    params = replace(RANDOM, max_tokens=10)

    async def alone(client: Any) -> list[SampleOutput]:
        return [await client.ask(prompt, who, params, n=2) for prompt in PROMPTS for who in world.everyone]

    async def together(client: Any) -> list[SampleOutput]:
        other = SamplingParams(max_tokens=7, temperature=2.0, top_k=5)
        crowd = [client.ask(prompt[::-1], who, other, n=3) for prompt in PROMPTS for who in world.everyone]
        mine = [client.ask(prompt, who, params, n=2) for prompt in PROMPTS for who in world.everyone]
        return list(await asyncio.gather(*crowd, *mine))[len(crowd) :]

    expected = serve(world.base, alone)
    for limits in ({}, {"max_sequences": 5}, {"cache_bytes": 1}):
        for one, other in zip(expected, serve(world.base, together, **limits), strict=True):
            for left, right in zip(one.sequences, other.sequences, strict=True):
                assert_same(left, right)


def test_many_adapters_of_a_large_total_rank_take_the_segment_path(
    world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def task(client: Any) -> list[SampleOutput]:
        return await asyncio.gather(*(client.ask(PROMPTS[0], who, GREEDY) for who in world.everyone))

    monkeypatch.setattr("engine.sampling.forward_pass.MAX_STACKED_RANK", 1)
    for who, output in zip(world.everyone, serve(world.base, task), strict=True):
        assert only(output).tokens.tolist() == who.greedy(PROMPTS[0], 24)


def test_temperature_and_truncation_do_not_change_what_is_reported(world: Any, serve: Any) -> None:
    params = replace(RANDOM, temperature=1.7, top_k=40, top_p=0.8)
    sequence = only(serve(world.base, lambda client: client.ask(PROMPTS[0], world.cat, params)))
    reference = world.cat.logprobs(PROMPTS[0], sequence.tokens.tolist())[len(PROMPTS[0]) :]
    np.testing.assert_allclose(sequence.logprobs, reference[np.arange(24), sequence.tokens], atol=TOLERANCE)
    for token, row in zip(sequence.tokens, reference, strict=True):
        assert (row > row[token]).sum() < 40


def test_seeds(world: Any, serve: Any) -> None:
    async def task(client: Any) -> list[list[tuple[int, ...]]]:
        runs = []
        for seed in (5, 5, 6, None, None):
            output = await client.ask(PROMPTS[0], world.cat, replace(RANDOM, seed=seed, temperature=3.0), n=4)
            runs.append([tuple(sequence.tokens.tolist()) for sequence in output.sequences])
        return runs

    first, again, other, fresh, fresher = serve(world.base, task)
    assert first == again
    assert len({*first, *other, *fresh, *fresher}) == 16
    assert len(first) == 4


def test_more_samples_than_the_batch_holds(world: Any, serve: Any) -> None:
    async def task(client: Any) -> SampleOutput:
        output, _ = await asyncio.gather(
            client.ask(PROMPTS[2], world.dog, RANDOM, n=11, prompt_logprobs=True),
            client.ask(PROMPTS[0], world.cat, GREEDY),
        )
        return output

    small, large = serve(world.base, task, max_sequences=3), serve(world.base, task)
    assert len(small.sequences) == 11
    for left, right in zip(small.sequences, large.sequences, strict=True):
        assert_same(left, right)
    np.testing.assert_allclose(small.prompt_logprobs, large.prompt_logprobs, atol=TOLERANCE)


def test_stop_tokens_end_a_sequence_and_stay_in_it(world: Any, serve: Any) -> None:
    tokens = world.cat.greedy(PROMPTS[0], 24)
    stop = tokens[9]
    params = replace(GREEDY, stop_tokens=[stop])
    sequence = only(serve(world.base, lambda client: client.ask(PROMPTS[0], world.cat, params)))
    assert sequence.tokens.tolist() == tokens[: tokens.index(stop) + 1]
    assert sequence.stop_reason == "stop"
    assert len(sequence.logprobs) == len(sequence.tokens)


def test_stop_strings_straddle_tokens(world: Any, serve: Any) -> None:
    base: BaseModel = world.base
    params = replace(RANDOM, max_tokens=200, temperature=4.0)

    async def task(client: Any) -> list[SampleOutput]:
        free = await client.ask(PROMPTS[0], world.dog, params)
        text = base.tokenizer.decode(only(free).tokens.tolist())
        string = next(text[i : i + 2] for i in range(20, len(text)) if text[i : i + 2].isascii())
        strict = replace(params, stop_strings=["not in there at all", string], stop_tokens=None)
        return [free, await client.ask(PROMPTS[0], world.dog, strict), string]

    free, stopped, string = serve(base, task)
    tokens = only(stopped).tokens.tolist()
    assert tokens == only(free).tokens.tolist()[: len(tokens)]
    assert string in base.tokenizer.decode(tokens)
    assert string not in base.tokenizer.decode(tokens[:-1])
    assert only(stopped).stop_reason == "stop"


@pytest.mark.parametrize(
    ("params", "stops"),
    [
        (SamplingParams(temperature=0, max_tokens=12), True),
        (SamplingParams(temperature=0, max_tokens=12, stop_tokens=[]), False),
        (SamplingParams(temperature=0, max_tokens=12, stop_strings=[]), False),
        (SamplingParams(temperature=0, max_tokens=12, stop_strings=["never"]), False),
    ],
)
def test_end_of_sequence_stops_unless_stops_are_given(
    world: Any, serve: Any, params: SamplingParams, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = world.bare.greedy(PROMPTS[0], 12)
    base = BaseModel.load(world.base.facts, dtype="float32", device="cpu")
    base.model.generation_config.eos_token_id = [tokens[5], 319]
    sequence = only(serve(base, lambda client: client.ask(PROMPTS[0], world.bare, params)))
    assert sequence.tokens.tolist() == (tokens[: tokens.index(tokens[5]) + 1] if stops else tokens)
    assert sequence.stop_reason == ("stop" if stops else "length")


def test_the_context_may_be_filled_to_its_last_token(world: Any, serve: Any) -> None:
    context = world.base.facts.context_length
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, 256, context - 6)]

    async def task(client: Any) -> list[SampleOutput]:
        exact = await client.ask(prompt, world.cat, replace(GREEDY, max_tokens=6))
        return [exact, await client.ask(prompt, world.cat, replace(GREEDY, max_tokens=None))]

    for output in serve(world.base, task):
        assert only(output).tokens.tolist() == world.cat.greedy(prompt, 6)
        assert only(output).stop_reason == "length"


@pytest.mark.parametrize("last_n", [None, 0, 1, 3, 50, 10_000])
def test_prompt_scores(world: Any, serve: Any, last_n: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_SCORED_LOGITS", 320 * 7)  # several chunks, even for these prompts
    one = SamplingParams(max_tokens=1)

    async def task(client: Any) -> list[SampleOutput]:
        asks = [
            client.ask(prompt, who, one, prompt_logprobs=True, topk_prompt_logprobs=4, prompt_logprobs_last_n=last_n)
            for prompt in PROMPTS
            for who in world.everyone
        ]
        asks.append(client.ask(PROMPTS[2], world.dog, one))
        return await asyncio.gather(*asks)

    *outputs, unasked = serve(world.base, task)
    assert unasked.prompt_logprobs is None
    assert unasked.topk_prompt_logprobs is None
    for output, (prompt, who) in zip(outputs, [(p, w) for p in PROMPTS for w in world.everyone], strict=True):
        table = who.logprobs(prompt, [])
        table = np.concatenate([table, np.zeros((1, table.shape[1]), np.float32)])[: len(prompt)]
        start = max(1, 0 if last_n is None else len(prompt) - last_n)
        expected = table[np.arange(len(prompt)), prompt]
        expected[:start] = np.nan
        assert output.prompt_logprobs.dtype == np.float32
        np.testing.assert_allclose(output.prompt_logprobs, expected, atol=TOLERANCE)
        assert_topk(output.topk_prompt_logprobs, table, 4, start)


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
    async def task(client: Any) -> list[SampleOutput]:
        return await asyncio.gather(
            client.ask(PROMPTS[0], world.cat, RANDOM, topk_sample_logprobs=3, n=2),
            client.ask(PROMPTS[1], world.dog, RANDOM, topk_sample_logprobs=1000),
            client.ask(PROMPTS[1], world.bare, RANDOM),
        )

    few, all_of_them, none = serve(world.base, task)
    assert only(none).topk_logprobs is None
    for sequence in few.sequences:
        table = world.cat.logprobs(PROMPTS[0], sequence.tokens.tolist())[len(PROMPTS[0]) :]
        assert_topk(sequence.topk_logprobs, table, 3, 0)
    topk = only(all_of_them).topk_logprobs
    assert topk is not None
    vocabulary = world.base.facts.vocabulary_size
    assert topk.token_ids.shape == (24, 1000)
    assert (topk.logprobs[:, vocabulary:] == np.float32(-99999.0)).all()
    assert (np.sort(topk.token_ids[:, :vocabulary]) == np.arange(vocabulary)).all()


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

    async def task(client: Any) -> list[SampleOutput]:
        asks = [client.ask(p, who, GREEDY, prompt_logprobs=True) for p in prompts for who in world.everyone]
        return await asyncio.gather(*asks)

    for output, (prompt, who) in zip(
        serve(world.base, task), [(p, w) for p in prompts for w in world.everyone], strict=True
    ):
        tokens = only(output).tokens.tolist()
        assert tokens == who.greedy(prompt, 24)
        np.testing.assert_allclose(only(output).logprobs, who.of_tokens(prompt, tokens), atol=TOLERANCE)
        table = who.logprobs(prompt, [0])
        np.testing.assert_allclose(
            output.prompt_logprobs[1:], table[np.arange(1, len(prompt)), prompt[1:]], atol=TOLERANCE
        )


BAD_REQUESTS = [
    ([], SamplingParams(max_tokens=1), "prompt"),
    ([320], SamplingParams(max_tokens=1), "prompt"),
    ([-1], SamplingParams(max_tokens=1), "prompt"),
    ([1], SamplingParams(max_tokens=0), "max_tokens"),
    ([1], SamplingParams(max_tokens=2048), "max_tokens"),
    ([1] * 2048, SamplingParams(), "context"),
    ([1], SamplingParams(max_tokens=1, temperature=-1), "temperature"),
    ([1], SamplingParams(max_tokens=1, temperature=float("nan")), "temperature"),
    ([1], SamplingParams(max_tokens=1, top_p=0), "top_p"),
    ([1], SamplingParams(max_tokens=1, stop_strings=[""]), "stop"),
]


def test_bad_requests_name_the_field(world: Any, serve: Any) -> None:
    async def task(client: Any) -> None:
        for prompt, params, field in BAD_REQUESTS:
            with pytest.raises(InvalidRequest, match=field):
                await client.ask(prompt, world.bare, params)

    serve(world.base, task)


def test_stop_strings_need_a_tokenizer(world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(world.base), "tokenizer", None)

    async def task(client: Any) -> None:
        with pytest.raises(InvalidRequest, match="tokenizer"):
            await client.ask([1], world.bare, SamplingParams(stop_strings=["x"]))
        await client.ask([1], world.bare, SamplingParams(max_tokens=1, stop_tokens=[3]))

    serve(world.base, task)


def test_logits_that_are_not_numbers_fail_their_request_alone(world: Any, serve: Any) -> None:
    base = BaseModel.load(world.base.facts, dtype="float32", device="cpu")
    base.model.get_input_embeddings().weight[7] = torch.nan

    async def task(client: Any) -> list[Any]:
        asks = [
            client.ask([7, 8], world.bare, GREEDY),
            client.ask([8, 7], world.bare, GREEDY, prompt_logprobs=True),
            client.ask([9, 10, 11], world.bare, replace(GREEDY, max_tokens=3)),
        ]
        return await asyncio.gather(*asks, return_exceptions=True)

    sampled, scored, fine = serve(base, task)
    assert isinstance(sampled, EngineFailure)
    assert isinstance(scored, EngineFailure)
    assert only(fine).tokens.tolist() == world.bare.greedy([9, 10, 11], 3)
