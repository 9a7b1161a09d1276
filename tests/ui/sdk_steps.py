"""A training client that takes a step for each line that it reads, through the public ``tinker`` SDK.

    python -m tests.ui.sdk_steps BASE_URL API_KEY BASE_MODEL

Prints the run's id, then for each line the step's mean loss, computed from the SDK's metrics alone. A line ``save`` publishes a
version instead. Ends with its input.
"""

import json
import sys

import tinker
from tinker import types

from tests.e2e.sdk_end import end

HOSTILE = "<img src=x onerror=alert(1)>\u202e"
WEIGHTS = [1.0, 0.5, 0.0, 2.0, 1.0]


def main(base_url: str, api_key: str, base_model: str) -> None:
    """Answer each line."""
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    trainer = service.create_lora_training_client(
        base_model=base_model, rank=4, seed=1, user_metadata={"task": HOSTILE}
    ).result()
    print(json.dumps({"run": trainer.model_id}), flush=True)
    tokens = list(b"Hello")
    inputs = {
        "target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[5]),
        "weights": types.TensorData(data=WEIGHTS, dtype="float32", shape=[5]),
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    for line in sys.stdin:
        if line.strip() == "save":
            print(json.dumps({"path": trainer.save_weights_for_sampler("v1").result().path}), flush=True)
            continue
        computed = trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        print(json.dumps({"mean": computed.result().metrics["loss:sum"] / sum(WEIGHTS)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
    end()
