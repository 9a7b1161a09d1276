"""The sampler beside the trainer through the public ``tinker`` SDK; run as a script, since the SDK keeps connections open.

    python sdk_on_policy.py BASE_URL API_KEY OTHER_KEY BASE_MODEL

Prints one JSON line: how far what is sampled is from what is trained, and prompt scores beside another tenant's samples.
"""

import sys
from collections.abc import Sequence

import tinker
from tinker import types

TOKENS = [84, 104, 101, 32, 99, 97, 116, 32, 115, 97, 121, 115, 58, 32, 109, 101, 111, 119]
PROMPT = types.ModelInput.from_ints(TOKENS[:8])
DRAWN, SAMPLES = 24, 4


def floats(values: list[float]) -> types.TensorData:
    """A vector."""
    return types.TensorData(data=values, dtype="float32", shape=[len(values)])


def trained(service: tinker.ServiceClient, base_model: str, seed: int) -> tinker.TrainingClient:
    """A run whose adapter, on every projection and the head, is far from its start."""
    client = service.create_lora_training_client(base_model=base_model, rank=8, seed=seed)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=TOKENS[1:], dtype="int64", shape=[len(TOKENS) - 1]),
            "weights": floats([1.0] * (len(TOKENS) - 1)),
        },
    )
    for _ in range(3):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    return client


def policy_datum(tokens: list[int], logprobs: list[float]) -> types.Datum:
    """A sampled sequence, with the logprobs that it was sampled with."""
    whole = [*TOKENS[:8], *tokens]
    zeros = [0.0] * 7
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=whole[1:], dtype="int64", shape=[len(whole) - 1]),
            "logprobs": floats([*zeros, *logprobs]),
            "advantages": floats([*zeros, *[1.0] * len(tokens)]),
        },
    )


def measured(run: tinker.TrainingClient, drawn: Sequence[types.SampledSequence]) -> dict[str, float]:
    """Metrics of a policy loss on what was drawn."""
    data = [policy_datum([int(one) for one in found.tokens], [float(one) for one in found.logprobs]) for found in drawn]
    return dict(run.forward(data, "importance_sampling").result().metrics)


def main(base_url: str, keys: list[str], base_model: str) -> dict[str, object]:
    """Train two tenants' adapters, sample both, and compare with the trainer."""
    services = [tinker.ServiceClient(base_url=base_url, api_key=key) for key in keys]
    runs = [trained(service, base_model, seed) for seed, service in enumerate(services)]
    samplers = [run.save_weights_and_get_sampling_client() for run in runs]
    params = types.SamplingParams(max_tokens=DRAWN, temperature=1.0, seed=5)
    beside = samplers[1].sample(PROMPT, SAMPLES, types.SamplingParams(max_tokens=200, seed=6, stop=[]))
    drawn = samplers[0].sample(PROMPT, SAMPLES, params).result().sequences
    metrics = measured(runs[0], drawn)
    scored = samplers[0].compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    known = policy_datum(TOKENS[8:], [0.0] * len(TOKENS[8:]))
    whole = runs[0].forward([known], "cross_entropy").result()
    expected = list(whole.loss_fn_outputs[0]["logprobs"].data)
    worst = max(abs(float(one or 0) - float(other)) for one, other in zip(scored[1:], expected, strict=True))
    theirs = beside.result().sequences
    other = measured(runs[1], theirs)
    return {
        "kl": metrics["sampling_kl:mean"],
        "sampled": metrics["sampled_tokens:sum"],
        "others_kl": other["sampling_kl:mean"],
        "scores_off": worst,
    }


if __name__ == "__main__":
    from sdk_end import end

    url, key, other_key, base = sys.argv[1:5]
    end(main(url, [key, other_key], base))
