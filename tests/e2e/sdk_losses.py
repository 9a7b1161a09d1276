"""Losses and optimizers through the public ``tinker`` SDK; run as a script, since the SDK keeps connections open in its process.

    python sdk_losses.py BASE_URL API_KEY OTHER_KEY BASE_MODEL

Prints one JSON line: metrics by loss, and the errors of what is refused. The other tenant's work runs beside each loss.
"""

import json
import sys

import tinker
from tinker import types

TOKENS = [84, 104, 101, 32, 109, 101, 111, 119]
LENGTH = len(TOKENS) - 1
PROMPT = 3
"""Positions that predict tokens of the prompt."""
DRIFT = [0.3, -0.2, 0.05, 0.0]
ADVANTAGES = [1.0, -0.5, 2.0, 1.5]


def datum(**inputs: list[float]) -> types.Datum:
    """The sequence with float32 inputs."""
    given = {name: types.TensorData(data=values, dtype="float32", shape=[LENGTH]) for name, values in inputs.items()}
    targets = types.TensorData(data=TOKENS[1:], dtype="int64", shape=[LENGTH])
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={"target_tokens": targets, **given}
    )


def main(base_url: str, keys: list[str], base_model: str) -> dict[str, object]:
    """Train with each loss once, beside the other tenant's supervised training."""
    services = [tinker.ServiceClient(base_url=base_url, api_key=key) for key in keys]
    ours, neighbours = (one.create_lora_training_client(base_model=base_model, rank=4, seed=2) for one in services)
    plain = datum(weights=[1.0] * LENGTH)
    alone = neighbours.forward([plain], "cross_entropy").result().metrics["loss:sum"]
    now = list(ours.forward([plain], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)[PROMPT:]
    zeros = [0.0] * PROMPT
    sampled = [float(logp - drift) for logp, drift in zip(now, DRIFT, strict=True)]
    policy = {"logprobs": zeros + sampled, "advantages": zeros + ADVANTAGES}
    marked = {**policy, "sequence_ratio_mask": zeros + [1.0] * len(DRIFT)}
    seen: dict[str, object] = {"logp": now, "alone": alone, "beside": []}
    for loss, inputs, config in (("gspo", marked, None), ("stable_reinforce", policy, {"kl_coeff": 0.5})):
        beside = neighbours.forward_backward([plain], "cross_entropy")
        seen[loss] = dict(ours.forward_backward([datum(**inputs)], loss, config).result().metrics)
        seen["beside"] += [beside.result().metrics["loss:sum"]]  # type: ignore[operator]
    try:
        ours.forward_backward([datum(**policy)], "gspo").result()
    except tinker.TinkerError as error:
        seen["refused"] = str(error)
    seen["dimuon"] = dimuon(services[0], base_model, plain)
    return seen


def dimuon(service: tinker.ServiceClient, base_model: str, plain: types.Datum) -> dict[str, object]:
    """Train by dimuon, save, go on from the state, and try a step of AdamW."""
    config, step = types.DimuonOptimizerConfig(), types.DimuonParams(learning_rate=0.005)
    trainer = service.create_lora_training_client(base_model=base_model, rank=4, seed=2, optimizer=config)

    def losses(client: tinker.TrainingClient, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            found.append(client.forward_backward([plain], "cross_entropy").result().metrics["loss:sum"])
            client.optim_step(step).result()
        return found

    seen: dict[str, object] = {"losses": losses(trainer, 12)}
    state = trainer.save_state("dimuon").result().path
    resumed = service.create_training_client_from_state_with_optimizer(state)
    seen["goes_on"], seen["resumed"] = losses(trainer, 3), losses(resumed, 3)
    try:
        resumed.optim_step(types.AdamParams()).result()
    except tinker.TinkerError as error:
        seen["refused"] = str(error)
    return seen


if __name__ == "__main__":
    url, key, other_key, base = sys.argv[1:5]
    print(json.dumps(main(url, [key, other_key], base)))
