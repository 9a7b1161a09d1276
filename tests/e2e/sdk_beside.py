"""The public ``tinker`` SDK and weft's client in one process: one trains and samples, the other follows and streams.

    python sdk_beside.py BASE_URL API_KEY BASE_MODEL

Prints one JSON line.
"""

import asyncio
import sys
from typing import Any

import tinker
from tinker import types
from weft_client import AsyncWeft
from weft_client.models import PointInfo
from weft_client.streams import Accepted, Done, Tokens

STEPS = 3
PROMPT = list(b"Hello")
LENGTH = 8
SEQ_ID = 1000
"""Number that none of the SDK's samples has."""


def datum() -> types.Datum:
    """One sequence to learn."""
    inputs = {"target_tokens": types.TensorData(data=PROMPT, dtype="int64", shape=[len(PROMPT)])}
    return types.Datum(model_input=types.ModelInput.from_ints(PROMPT), loss_fn_inputs=inputs)


async def train(trainer: tinker.TrainingClient) -> list[float]:
    """Losses of a few steps."""
    losses = []
    for _ in range(STEPS):
        computed = await trainer.forward_backward_async([datum()], "cross_entropy")
        stepped = await trainer.optim_step_async(types.AdamParams(learning_rate=1e-3))
        losses.append((await computed.result_async()).metrics["loss:sum"])
        await stepped.result_async()
    return losses


async def follow(weft: AsyncWeft, run: str) -> list[PointInfo]:
    """Points of as many steps, as they come."""
    points: list[PointInfo] = []
    async for point in weft.runs.follow(run, every=0.1):
        points.append(point)
        if len(points) == STEPS:
            break
    return points


async def streamed(weft: AsyncWeft, sampler: str) -> dict[str, Any]:
    """A greedy sample, token by token, and the report on it."""
    seen: dict[str, Any] = {"tokens": []}
    request = ""
    async for event in weft.samples.stream(sampler, PROMPT, seq_id=SEQ_ID, max_tokens=LENGTH, temperature=0.0):
        if isinstance(event, Accepted):
            request = event.request_id
        elif isinstance(event, Tokens):
            seen["tokens"] += event.tokens
        elif isinstance(event, Done):
            seen["whole"] = event.sequences[0].tokens
    (sequence,) = (await weft.samples.report(request)).sequences
    return seen | {"made_by": len({span.version for span in sequence.spans})}


async def main(base_url: str, api_key: str, base_model: str) -> dict[str, Any]:
    """Both at once, on one run and on one sampler."""
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    trainer = await service.create_lora_training_client_async(base_model=base_model, rank=4, seed=1)
    run = str(trainer.model_id)
    async with AsyncWeft(base_url, api_key) as weft:
        losses, points = await asyncio.gather(train(trainer), follow(weft, run))
        sampler = await trainer.save_weights_and_get_sampling_client_async(name="one")
        params = types.SamplingParams(max_tokens=LENGTH, temperature=0.0)
        drawn, stream = await asyncio.gather(
            sampler.sample_async(types.ModelInput.from_ints(PROMPT), 1, params),
            streamed(weft, sampler._sampling_session_id),
        )
        return {
            "sdk": tinker.__version__,
            "losses": losses,
            "points": [[point.step, point.loss_sum] for point in points],
            "drawn": drawn.sequences[0].tokens,
            "streamed": stream,
            "listed": run in [one.id for one in (await weft.runs.page()).runs],
        }


if __name__ == "__main__":
    from sdk_end import end

    end(asyncio.run(main(*sys.argv[1:4])))
