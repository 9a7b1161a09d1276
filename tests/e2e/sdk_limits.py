"""A client that runs into its tenant's limits, through the public ``tinker`` SDK.

    python sdk_limits.py BASE_URL API_KEY BASE_MODEL

The client knows nothing of limits: it sends all its work at once and waits for the results. Prints one JSON line.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tinker
from tinker import types

STEPS = 6
SAMPLES = 6


def datum() -> types.Datum:
    """One sequence to learn."""
    tokens = list(b"meow meow")
    inputs = {"target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[len(tokens)])}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def train(trainer: tinker.TrainingClient, steps: int) -> list[float]:
    """Losses of as many steps, sent without waiting for any."""
    computed = []
    for _ in range(steps):
        computed.append(trainer.forward_backward([datum()], "cross_entropy"))
        last = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
    last.result()
    return [one.result().metrics["loss:sum"] for one in computed]


def main(base_url: str, api_key: str, base_model: str) -> dict[str, Any]:
    """Every limit once."""

    def client() -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=base_url, api_key=api_key)

    def create(service: tinker.ServiceClient) -> tinker.TrainingClient:
        return service.create_lora_training_client(base_model=base_model, rank=4, seed=1).result()

    seen: dict[str, Any] = {}
    first, second = client(), client()
    first.__enter__()
    trainer = create(first)
    seen["losses"] = train(trainer, STEPS)
    sampler = first.create_sampling_client(base_model=base_model)
    params = types.SamplingParams(max_tokens=8)
    asked = [sampler.sample(types.ModelInput.from_ints([109]), 1, params) for _ in range(SAMPLES)]
    seen["samples"] = sum(len(one.result().sequences) for one in asked)
    seen["saved"] = trainer.save_state("one").result().path
    try:
        trainer.save_state("two").result()
    except tinker.TinkerError as error:
        seen["refused"] = str(error)
    seen["after_refusal"] = train(trainer, 1)
    with ThreadPoolExecutor(1) as waiting:
        other = waiting.submit(create, second)
        print("waiting", flush=True)
        sys.stdin.readline()
        seen["second_waited"] = not other.done()
        first.__exit__(None, None, None)
        seen["second_losses"] = train(other.result(timeout=120), 1)
    return seen


if __name__ == "__main__":
    from sdk_end import end

    end(main(*sys.argv[1:4]))
