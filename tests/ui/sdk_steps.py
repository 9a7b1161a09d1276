"""A training client that takes a step whenever it is asked to, through the public ``tinker`` SDK."""

import os
from multiprocessing.connection import Connection

import tinker
from tinker import types

HOSTILE = "<img src=x onerror=alert(1)>\u202e"
STEP = "step"
SAVE = "save"
WEIGHTS = [1.0, 0.5, 0.0, 2.0, 1.0]


def serve(asked: Connection, base_url: str, api_key: str, base_model: str) -> None:
    """Send the id of a new run, then for each ``STEP`` its mean loss and for each ``SAVE`` the new version's path.

    The mean loss is computed from the SDK's metrics alone. Ends when ``asked`` is closed.
    """
    os.environ["TINKER_TELEMETRY"] = "0"
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    trainer = service.create_lora_training_client(
        base_model=base_model, rank=4, seed=1, user_metadata={"task": HOSTILE}
    ).result()
    asked.send(trainer.model_id)
    tokens = list(b"Hello")
    inputs = {
        "target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[5]),
        "weights": types.TensorData(data=WEIGHTS, dtype="float32", shape=[5]),
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    while True:
        if asked.recv() == SAVE:
            asked.send(trainer.save_weights_for_sampler("v1").result().path)
            continue
        computed = trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        asked.send(computed.result().metrics["loss:sum"] / sum(WEIGHTS))
