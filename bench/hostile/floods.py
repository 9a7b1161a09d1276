"""Attacks by number and size: more work, rows and waiting than anybody needs (A5, A6, B2)."""

import asyncio
from itertools import count
from typing import Any

import orjson

from bench.hostile.foothold import PREFIX, Foothold, again_and_again

_CONNECTIONS = 32
_POLLS = 200
_RUNS = 8
_LONG = 2000
"""Tokens of a long sequence: about the context of the tiny base."""
_METADATA = {"note": "x" * 15_000}


async def pending_training(foothold: Foothold) -> None:
    """Send steps of 16 x 512 tokens to eight runs, as fast as they are accepted (A5)."""
    runs = [await foothold.run() for _ in range(_RUNS)]
    lanes = [count(1) for _ in runs]
    tokens = [number % 256 for number in range(512)]
    tensor = {"data": tokens, "dtype": "int64", "shape": [512]}
    weights = {"data": [1.0] * 512, "dtype": "float32", "shape": [512]}
    datum = {
        "model_input": {"chunks": [{"tokens": tokens}]},
        "loss_fn_inputs": {"target_tokens": tensor, "weights": weights},
    }
    lesson = orjson.Fragment(orjson.dumps({"data": [datum] * 16, "loss_fn": "cross_entropy"}))

    async def send(number: int) -> None:
        place = number % _RUNS
        body = {"model_id": runs[place], "seq_id": next(lanes[place]), "forward_backward_input": lesson}
        await foothold.post("forward_backward", body)

    await again_and_again(_CONNECTIONS, send)


async def gaps(foothold: Foothold) -> None:
    """Send operations behind a seq_id that never comes, and operations that fail, into one run after another (A5)."""
    run = await foothold.run()

    async def send(number: int) -> None:
        await foothold.post("optim_step", {"model_id": run, "seq_id": number % 8000 + 2})
        await foothold.post("forward", {"model_id": run, "seq_id": 2**31 - 1 - number, "forward_input": {"data": [{}]}})

    await again_and_again(_CONNECTIONS, send)


async def sessions_and_runs(foothold: Foothold) -> None:
    """Open sessions, runs and samplers with as much metadata as is taken (A5)."""

    async def send(number: int) -> None:
        match number % 3:
            case 0:
                status, content = await foothold.post("create_session", {"user_metadata": _METADATA})
                if status == 200:
                    foothold.further_sessions.append(orjson.loads(content)["session_id"])
            case 1:
                lora = {"rank": 1, "seed": 0, "train_unembed": False}
                body = {"session_id": foothold.session, "model_seq_id": next(foothold.numbers)}
                asked = {**body, "base_model": foothold.base_model, "lora_config": lora, "user_metadata": _METADATA}
                await foothold.post("create_model", asked)
            case _:
                body = {"session_id": foothold.session, "sampling_session_seq_id": next(foothold.numbers)}
                await foothold.post("create_sampling_session", {**body, "base_model": foothold.base_model})

    await again_and_again(_CONNECTIONS, send)


async def huge_samples(foothold: Foothold) -> None:
    """Ask for a thousand long sequences in each sample, with alternatives of each token (A6)."""
    sampler = await foothold.sampler()
    sizes: list[dict[str, Any]] = [
        {"num_samples": 1024, "sampling_params": {"max_tokens": _LONG}},
        {"num_samples": 80, "sampling_params": {"max_tokens": _LONG}, "topk_sample_logprobs": 100},
    ]
    await _flood(foothold, sampler, [1, 2, 3], sizes, connections=8)


async def sample_flood(foothold: Foothold) -> None:
    """Ask for thousands of long samples of one sequence each (A6)."""
    await _flood(foothold, await foothold.sampler(), [1, 2, 3], [{"sampling_params": {"max_tokens": 256}}])


async def long_prompts(foothold: Foothold) -> None:
    """Ask for the logprobs of long prompts with a hundred alternatives of each token (A6)."""
    scored = {"prompt_logprobs": True, "topk_prompt_logprobs": 100, "sampling_params": {"max_tokens": 1}}
    prompt = [number % 256 for number in range(_LONG)]
    sampler = await foothold.sampler()
    accepted: list[str] = []

    async def send(number: int) -> None:
        status, content = await _sample(foothold, sampler, number, prompt, scored)
        if status == 200:
            accepted.append(orjson.loads(content)["request_id"])
        if number % 2 and accepted:
            asked = orjson.dumps({"request_id": accepted[number % len(accepted)]})
            await foothold.send("POST", f"{PREFIX}/retrieve_future", asked)

    await again_and_again(_CONNECTIONS, send)


async def held_polls(foothold: Foothold) -> None:
    """Hold hundreds of polls for results that never come, and drop and repeat some of them (A6)."""
    run = await foothold.run()
    waiting = (await foothold.asked("optim_step", {"model_id": run, "seq_id": 2}))["request_id"]
    asked = orjson.dumps({"request_id": waiting})

    async def poll(number: int) -> None:
        try:
            async with asyncio.timeout(0.2 if number % 2 else 20):
                await foothold.send("POST", f"{PREFIX}/retrieve_future", asked)
        except TimeoutError:
            pass

    await again_and_again(_POLLS, poll)


async def paused_samples(foothold: Foothold) -> None:
    """Pause an adapter and ask for thousands of its samples, which then wait (B2)."""
    run = await foothold.run()
    sampler = await foothold.sampler(await foothold.checkpoint(run))
    await foothold.post(f"adapters/{run}/pause", {"ttl_seconds": 600_000, "timeout_seconds": 0})
    await _flood(foothold, sampler, [1, 2, 3], [{"sampling_params": {"max_tokens": 16}}])


async def gates_and_saves(foothold: Foothold) -> None:
    """Pause, resume, save, reload, list and open download links, as fast as it goes (A5)."""
    run = await foothold.run()
    await foothold.checkpoint(run)
    seq_ids = count(2)
    asked: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", f"adapters/{run}/pause", {"timeout_seconds": 0}),
        ("POST", f"adapters/{run}/resume", {}),
        ("POST", f"adapters/{run}/reload", {}),
        ("GET", "checkpoints?limit=1000", None),
        ("GET", "training_runs?limit=1000", None),
        ("GET", "sessions?limit=1000", None),
        ("GET", f"training_runs/{run}/checkpoints/sampler_weights/v1/archive", None),
        ("POST", "", None),
    ]

    async def send(number: int) -> None:
        method, endpoint, body = asked[number % len(asked)]
        if not endpoint:
            seq_id = next(seq_ids)
            await foothold.post("save_weights_for_sampler", {"model_id": run, "seq_id": seq_id, "path": f"v{seq_id}"})
            return
        await foothold.send(method, f"{PREFIX}/{endpoint}", None if body is None else orjson.dumps(body))

    await again_and_again(_CONNECTIONS, send)


async def _flood(
    foothold: Foothold, sampler: str, prompt: list[int], asked: list[dict[str, Any]], connections: int = _CONNECTIONS
) -> None:
    """Send samples in turn as ``asked``; answers that are refused slow nothing down."""

    async def send(number: int) -> None:
        await _sample(foothold, sampler, number, prompt, asked[number % len(asked)])

    await again_and_again(connections, send)


async def _sample(
    foothold: Foothold, sampler: str, seq_id: int, prompt: list[int], asked: dict[str, Any]
) -> tuple[int, bytes]:
    body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": {"chunks": [{"tokens": prompt}]}, **asked}
    return await foothold.post("asample", body)
