"""A tenant whose operation kills every trainer that computes it."""

import tinker
from tinker import types

from bench.chaos.ground import BASE, FaultNotOverError, Ground, keys_of
from bench.chaos.injected import DEADLY

_FAILED_SECONDS = 150.0
"""Longest time until the operation fails: trainers must start and die several times."""


class Poisoner:
    """A tenant of its own, with one run."""

    def __init__(self, ground: Ground) -> None:
        ((count,),) = ground.cluster.query("SELECT count(*) FROM tenants")
        (self._key,) = keys_of(ground, [f"poisoner-{count}"])
        self._url = ground.cluster.base_url

    def poison(self) -> None:
        """Send the operation and wait until it has failed. Raises ``FaultNotOverError`` when it has not, or succeeds."""
        client = tinker.ServiceClient(base_url=self._url, api_key=self._key)
        try:
            trainer = client.create_lora_training_client(base_model=BASE, rank=4, seed=1, train_unembed=False)
            tokens = [*DEADLY, 5, 6, 7]
            datum = types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
                    "weights": types.TensorData(
                        data=[1.0] * (len(tokens) - 1), dtype="float32", shape=[len(tokens) - 1]
                    ),
                },
            )
            passed = trainer.result().forward_backward([datum], "cross_entropy")
            try:
                passed.result(timeout=_FAILED_SECONDS)
            except tinker.RequestFailedError:
                return
            except TimeoutError as error:
                raise FaultNotOverError("the poison operation did not fail") from error
            raise FaultNotOverError("the poison operation succeeded")
        finally:
            client.close("success")
