"""A client whose requests are refused on their way, through the public ``tinker`` SDK.

    python sdk_gaps.py BASE_URL API_KEY BASE_MODEL

The first optimizer step and one large pass are refused. Prints one JSON line.
"""

import sys
from typing import Any

import tinker
from tinker import types


def datum(length: int) -> types.Datum:
    """One sequence to learn."""
    tokens = [109] * length
    inputs = {"target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[length])}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def main(base_url: str, api_key: str, base_model: str) -> dict[str, Any]:
    """Go on after each refusal, as a training loop does that catches errors."""
    seen: dict[str, Any] = {}
    with tinker.ServiceClient(base_url=base_url, api_key=api_key) as service:
        trainer = service.create_lora_training_client(base_model=base_model, rank=4, seed=1).result()

        def loss(data: list[types.Datum]) -> float:
            found: float = trainer.forward_backward(data, "cross_entropy").result(timeout=120).metrics["loss:sum"]
            return found

        def refusal(work: Any) -> str:
            try:
                work()
            except tinker.TinkerError as error:
                return str(error)
            return ""

        seen["before"] = loss([datum(8)])
        seen["refused"] = refusal(lambda: trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=120))
        seen["after_refusal"] = loss([datum(8)])
        seen["too_large"] = refusal(lambda: loss([datum(1000)] * 8))
        seen["after_too_large"] = loss([datum(8)])
    return seen


if __name__ == "__main__":
    from sdk_end import end

    end(main(*sys.argv[1:4]))
