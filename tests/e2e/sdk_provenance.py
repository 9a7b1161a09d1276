"""Training on recorded samples through the public ``tinker`` SDK; run as a script, since the SDK keeps connections.

    python sdk_provenance.py BASE_URL API_KEY OTHER_KEY BASE_MODEL

Prints one JSON line: the loss by how the sampling logprobs were given, and the errors of what is refused.
"""

import sys

import tinker
from tinker import types
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

PROMPT = list(b"The cat says ")
CONFIG = {"kl_coeff": 0.5}


def tensor(values: list[float]) -> types.TensorData:
    """Float32 values."""
    return types.TensorData(data=values, dtype="float32", shape=[len(values)])


def datum(sequence: types.SampledSequence, **inputs: list[float]) -> types.Datum:
    """Prompt and sequence, with an advantage of 1 for each sampled token."""
    tokens = [*PROMPT, *sequence.tokens]
    zeros, sampled = [0.0] * (len(PROMPT) - 1), [1.0] * len(sequence.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
            "advantages": tensor(zeros + sampled),
            **{name: tensor(zeros + values) for name, values in inputs.items()},
        },
    )


def named(of: types.Datum, sequence_id: str, length: int) -> types.Datum:
    """The datum with the spans that say where its tokens come from."""
    return of.with_provenance(
        model_input=[
            PromptProvenanceSpan(sequence_id=sequence_id, length=len(PROMPT)),
            SampledProvenanceSpan(sequence_id=sequence_id, length=length - 1),
        ],
        loss_fn_inputs=[
            PromptProvenanceSpan(sequence_id=sequence_id, offset=1, length=len(PROMPT) - 1),
            SampledProvenanceSpan(sequence_id=sequence_id, length=length),
        ],
    )


def main(base_url: str, keys: list[str], base_model: str) -> dict[str, object]:
    """Train on samples by their names, and try what must be refused."""
    services = [tinker.ServiceClient(base_url=base_url, api_key=key) for key in keys]
    ours, theirs = (one.create_lora_training_client(base_model=base_model, rank=4, seed=2) for one in services)
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=5, stop=[], seed=3)
    recorded = ours.save_weights_and_get_sampling_client(record_stability_info=True)
    plain = ours.save_weights_and_get_sampling_client()
    pair = recorded.sample(prompt, 2, params).result().sequences
    unrecorded = plain.sample(prompt, 1, params).result().sequences[0]
    # A step, so that the policy is no longer the one that sampled.
    ours.forward_backward([datum(pair[0], logprobs=list(pair[0].logprobs))], "importance_sampling").result()
    ours.optim_step(types.AdamParams(learning_rate=1e-2)).result()

    def loss(*data: types.Datum, by: tinker.TrainingClient = ours) -> float | str:
        try:
            return float(by.forward_backward(list(data), "stable_reinforce", CONFIG).result().metrics["loss:sum"])
        except tinker.TinkerError as error:
            return str(error)

    length = len(pair[0].tokens)
    by_name = [named(datum(one), one.sequence_id, length) for one in pair]
    return {
        "ids": [one.sequence_id for one in pair],
        "given": loss(*(datum(one, logprobs=list(one.logprobs)) for one in pair)),
        "named": loss(*by_name),
        "lied": loss(*(named(datum(one, logprobs=[-9.0] * length), one.sequence_id, length) for one in pair)),
        "other_tokens": loss(named(datum(pair[1]), pair[0].sequence_id, length)),
        "unrecorded": loss(named(datum(unrecorded), unrecorded.sequence_id, length)),
        "beyond": loss(named(datum(pair[0]), pair[0].sequence_id.rpartition(":")[0] + ":2", length)),
        "foreign": loss(*by_name, by=theirs),
        "again": loss(*by_name),
        "neither": loss(datum(pair[0])),
    }


if __name__ == "__main__":
    from sdk_end import end

    end(main(sys.argv[1], sys.argv[2:4], sys.argv[4]))
