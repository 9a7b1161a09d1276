"""A training client that the service may keep waiting: made, then trained one step, through the public ``tinker`` SDK.

    python sdk_waiting.py BASE_URL API_KEY BASE_MODEL

Prints the step's loss once it is there. Leaves its session, and so its model, open.
"""

import sys

import tinker
from tinker import types


def main(base_url: str, api_key: str, base_model: str) -> float:
    """One model, one step."""
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    trainer = service.create_lora_training_client(base_model=base_model, rank=4, seed=1).result()
    tokens = list(b"Hello")
    inputs = {"target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[5])}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    computed = trainer.forward_backward([datum], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    loss: float = computed.result().metrics["loss:sum"]
    return loss


if __name__ == "__main__":
    from sdk_end import end

    end(main(*sys.argv[1:4]))
