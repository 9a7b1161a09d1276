"""Use of imported checkpoints by the SDK; run as a script.

    python sdk_imported.py BASE_URL API_KEY OTHER_KEY TRAINING_PATH SAMPLER_PATH

Prints one JSON line.
"""

import sys
import warnings
from typing import Any

import tinker

TOKENS = [84, 104, 101, 32, 99, 97, 116]


def main(base_url: str, key: str, other_key: str, state: str, weights: str) -> dict[str, Any]:
    """Load, compute, train, sample and list; and see that another tenant cannot."""
    client = tinker.ServiceClient(base_url=base_url, api_key=key)
    trainer = client.create_training_client_from_state(state).result()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    computed = trainer.forward_backward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    after = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    sampler = client.create_sampling_client(model_path=weights).result()
    sampled = sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()
    listed = client.create_rest_client().list_user_checkpoints().result().checkpoints
    try:
        tinker.ServiceClient(base_url=base_url, api_key=other_key).create_training_client_from_state(state).result()
        foreign = "loaded"
    except tinker.NotFoundError:
        foreign = "not found"
    return {
        "computed": list(computed),
        "after": list(after),
        "sampled": sampled[1:],
        "sizes": [one.size_bytes for one in listed if one.tinker_path in (state, weights)],
        "foreign": foreign,
    }


if __name__ == "__main__":
    from sdk_end import end

    warnings.simplefilter("ignore", FutureWarning)
    end(main(*sys.argv[1:6]))
