"""Losses and optimizers through the public ``tinker`` SDK; run as a script, since the SDK keeps connections open in its process.

    python sdk_losses.py BASE_URL API_KEY OTHER_KEY BASE_MODEL

Prints one JSON line: metrics by loss, and the errors of what is refused. The other tenant's work runs beside each loss.
"""

import dataclasses
import sys
from typing import Any

import tinker
import torch
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
    whole = list(ours.forward([plain], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
    now = whole[PROMPT:]
    zeros = [0.0] * PROMPT
    sampled = [float(logp - drift) for logp, drift in zip(now, DRIFT, strict=True)]
    policy = {"logprobs": zeros + sampled, "advantages": zeros + ADVANTAGES}
    marked = {**policy, "sequence_ratio_mask": zeros + [1.0] * len(DRIFT)}
    seen: dict[str, object] = {"logp": now, "prompt": whole[:PROMPT], "alone": alone, "beside": []}
    losses: dict[types.LossFnType, tuple[dict[str, list[float]], dict[str, float] | None]] = {
        "importance_sampling": (policy, None),
        "ppo": (policy, None),
        "cispo": (policy, {"clip_high_threshold": 1.1}),
        "dro": (policy, {"beta": 0.5}),
        "gspo": (marked, None),
        "stable_reinforce": (policy, {"kl_coeff": 0.5}),
    }
    for loss, (inputs, config) in losses.items():
        beside = neighbours.forward_backward([plain], "cross_entropy")
        seen[loss] = dict(ours.forward_backward([datum(**inputs)], loss, config).result().metrics)
        seen["beside"] += [beside.result().metrics["loss:sum"]]  # type: ignore[operator]
    seen["unmarked"] = dict(ours.forward_backward([datum(**policy)], "gspo").result().metrics)
    try:
        ours.forward_backward([datum(logprobs=policy["logprobs"])], "gspo").result()
    except tinker.TinkerError as error:
        seen["refused"] = str(error)
    seen["custom"] = custom(services, [ours, neighbours], base_model, policy)
    seen["reference"] = reference(services[0], ours, base_model, plain)
    seen["dimuon"] = dimuon(services[0], base_model, plain, neighbours)
    return seen


def clipped(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """A clipped surrogate with a penalty of its own, as a user would write it."""
    ratio = torch.exp(logprobs - old)
    kept = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return 0.01 * (logprobs**2).mean() - kept.sum(), {"custom/ratio:mean": ratio.mean(), "custom/kept:sum": kept.sum()}


def forbidden(logprobs: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """A loss with an operator that weft does not run."""
    return torch.linalg.svdvals(logprobs.outer(logprobs)).sum(), {}


def custom(
    services: list[tinker.ServiceClient],
    runs: list[tinker.TrainingClient],
    base_model: str,
    policy: dict[str, list[float]],
) -> dict[str, object]:
    """One loss by the server and by the client, from equal weights; each trains once, beside the other tenant's work."""
    handle = services[0].create_custom_loss(clipped, {"logprobs": 1, "old": 1, "advantages": 1}).result()
    data = [
        datum(old=policy["logprobs"], advantages=policy["advantages"]),
        datum(old=[-5.0] * LENGTH, advantages=[1.0] * LENGTH),
    ]
    plain = datum(weights=[1.0] * LENGTH)
    alone = runs[1].forward([plain], "cross_entropy").result().metrics["loss:sum"]
    seen: dict[str, object] = {"is_uploaded": handle.loss_id is not None, "alone": alone}
    for kind, loss in (("server", handle), ("client", dataclasses.replace(handle, loss_id=None))):
        run = services[0].create_lora_training_client(base_model=base_model, rank=4, seed=7)
        beside = runs[1].forward([plain], "cross_entropy")
        done = run.forward_backward_custom(data, loss)
        stepped = run.optim_step(types.AdamParams(learning_rate=5e-3))
        found = done.result()
        metrics = {name: value for name, value in found.metrics.items() if not name.startswith("surrogate")}
        norm = stepped.result().metrics
        after = run.forward([plain], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        logprobs = [float(one) for output in found.loss_fn_outputs for one in output["logprobs"].data]
        seen[kind] = {
            "metrics": metrics,
            "norm": norm["grad_norm:max"] if norm else None,
            "logprobs": logprobs,
            "after": [float(one) for one in after],
            "beside": beside.result().metrics["loss:sum"],
        }
    try:
        services[0].create_custom_loss(forbidden, {"logprobs": 1}).result()
    except tinker.TinkerError as error:
        seen["refused"] = str(error)
    return seen


def reference(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient, base_model: str, plain: types.Datum
) -> dict[str, object]:
    """The base's logprobs by a forward without the adapter, and by a sampler of the base."""
    trainer.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    config = {"without_adapter": 1.0}
    bare, own = (
        [
            float(one)
            for one in trainer.forward([plain], "cross_entropy", given).result().loss_fn_outputs[0]["logprobs"].data
        ]
        for given in (config, None)
    )
    sampler = service.create_sampling_client(base_model=base_model)
    sampled = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:]
    try:
        trainer.forward_backward([plain], "cross_entropy", config).result()
    except tinker.TinkerError as error:
        return {"bare": bare, "own": own, "sampled": sampled, "refused": str(error)}
    return {}


def dimuon(
    service: tinker.ServiceClient, base_model: str, plain: types.Datum, neighbours: tinker.TrainingClient
) -> dict[str, object]:
    """Train by dimuon, save, go on from the state, and try a step of AdamW. The neighbour computes beside each step."""
    config, step = types.DimuonOptimizerConfig(), types.DimuonParams(learning_rate=0.005)
    trainer = service.create_lora_training_client(base_model=base_model, rank=4, seed=2, optimizer=config)

    def losses(client: tinker.TrainingClient, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            computed = client.forward_backward([plain], "cross_entropy")
            stepped = client.optim_step(step)
            beside.append(neighbours.forward([plain], "cross_entropy").result().metrics["loss:sum"])
            found.append(computed.result().metrics["loss:sum"])
            stepped.result()
        return found

    beside: list[float] = []
    seen: dict[str, object] = {"losses": losses(trainer, 12), "beside": beside}
    state = trainer.save_state("dimuon").result().path
    resumed = service.create_training_client_from_state_with_optimizer(state)
    seen["goes_on"], seen["resumed"] = losses(trainer, 3), losses(resumed, 3)
    try:
        resumed.optim_step(types.AdamParams()).result()
    except tinker.TinkerError as error:
        seen["refused"] = str(error)
    return seen


if __name__ == "__main__":
    from sdk_end import end

    url, key, other_key, base = sys.argv[1:5]
    end(main(url, [key, other_key], base))
