"""Two tenants that share checkpoints through the public ``tinker`` SDK.

    python sdk_sharing.py BASE_URL BASE_MODEL OWNER_KEY OWNERS_VIEWER_KEY OTHER_KEY PROJECT PAGE

PAGE is the how-to page whose first Python program is run as it stands. Prints one JSON line.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import tinker
from tinker import types

PROMPT = types.ModelInput.from_ints([1, 2, 3])
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0, seed=1)
SECONDS = 120


def drawn(client: Any) -> list[int]:
    """Tokens of a greedy sample."""
    answer = client.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result(timeout=SECONDS)
    return list(answer.sequences[0].tokens)


def datum() -> types.Datum:
    """One sequence to learn."""
    inputs = {
        "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3]),
        "weights": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3]),
    }
    return types.Datum(model_input=PROMPT, loss_fn_inputs=inputs)


def loss_of(client: Any) -> float:
    """Loss of the model as it is."""
    return float(client.forward([datum()], "cross_entropy").result(timeout=SECONDS).metrics["loss:sum"])


def refusal(act: Callable[[], Any]) -> str:
    """Name of the error that ``act`` ends with."""
    try:
        act()
    except tinker.TinkerError as error:
        return type(error).__name__
    return "none"


def ready(made: Any) -> Any:
    """Client of a call that newer SDKs answer with a future."""
    return made.result(timeout=SECONDS) if hasattr(made, "result") else made


class Owner:
    """Tenant with a trained model."""

    def __init__(self, url: str, base_model: str, key: str) -> None:
        self.url, self.key = url, key
        self.client = tinker.ServiceClient(base_url=url, api_key=key)
        trained = ready(self.client.create_lora_training_client(base_model, rank=4))
        for _ in range(3):
            trained.forward_backward([datum()], "cross_entropy").result(timeout=SECONDS)
            trained.optim_step(types.AdamParams(learning_rate=0.05)).result(timeout=SECONDS)
        self.weights = trained.save_state("one").result(timeout=SECONDS).path
        self.sampler = trained.save_weights_for_sampler("one").result(timeout=SECONDS).path
        self.loss = loss_of(trained)
        self.sampling = ready(self.client.create_sampling_client(model_path=self.sampler))
        self.tokens = drawn(self.sampling)

    def share(self, *, public: bool) -> None:
        """Publish both checkpoints, or take that back; twice, since a repeat does nothing."""
        rest = self.client.create_rest_client()
        act = rest.publish_checkpoint_from_tinker_path if public else rest.unpublish_checkpoint_from_tinker_path
        for path in (self.weights, self.sampler, self.sampler):
            act(path).result(timeout=SECONDS)

    def gate(self, verb: str, body: dict[str, Any]) -> int:
        """Status of a command to the model's gate."""
        run = self.sampler.removeprefix("tinker://").split("/")[0]
        answer = httpx.post(
            f"{self.url}/api/v1/adapters/{run}/{verb}", headers={"X-API-Key": self.key}, json=body, timeout=40
        )
        return answer.status_code


def published(owner: Owner, other: tinker.ServiceClient) -> dict[str, Any]:
    """Use of published checkpoints, and what is left of it once they are taken back."""
    seen: dict[str, Any] = {"before": refusal(lambda: ready(other.create_sampling_client(model_path=owner.sampler)))}
    owner.share(public=True)
    theirs = ready(other.create_sampling_client(model_path=owner.sampler))
    seen["same_tokens"] = drawn(theirs) == owner.tokens
    resumed = ready(other.create_training_client_from_state(owner.weights))
    seen["same_loss"] = loss_of(resumed) == owner.loss
    rest = other.create_rest_client()
    seen["delete"] = refusal(lambda: rest.delete_checkpoint_from_tinker_path(owner.sampler).result(timeout=SECONDS))
    seen["pause"] = owner.gate("pause", {"timeout_seconds": 30, "ttl_seconds": 600})
    seen["tokens_beside_a_pause"] = len(drawn(theirs))
    seen["resume"] = owner.gate("resume", {})
    owner.share(public=False)
    seen["sample_after"] = refusal(lambda: drawn(theirs))
    seen["load_after"] = refusal(lambda: ready(other.create_training_client_from_state(owner.weights)))
    seen["owner_goes_on"] = drawn(owner.sampling) == owner.tokens
    seen["trained_goes_on"] = loss_of(resumed) == owner.loss
    return seen


def copied(owner: Owner, other: tinker.ServiceClient, project: str) -> dict[str, Any]:
    """Copies of published checkpoints, which outlive the publication."""
    rest = other.create_rest_client()
    seen: dict[str, Any] = {
        "before": refusal(lambda: rest.copy_weights(owner.sampler, project).result(timeout=SECONDS))
    }
    owner.share(public=True)
    paths = [
        rest.copy_weights(path, project, ttl_seconds=7200).result(timeout=SECONDS)
        for path in (owner.weights, owner.sampler)
    ]
    owner.share(public=False)
    seen["same_tokens"] = drawn(ready(other.create_sampling_client(model_path=paths[1]))) == owner.tokens
    seen["same_loss"] = loss_of(ready(other.create_training_client_from_state_with_optimizer(paths[0]))) == owner.loss
    seen["owner_reads_it"] = refusal(lambda: ready(owner.client.create_sampling_client(model_path=paths[1])))
    listed = {one.tinker_path for one in rest.list_user_checkpoints().result(timeout=SECONDS).checkpoints}
    seen["listed"] = set(paths) <= listed
    rest.delete_checkpoint_from_tinker_path(paths[1]).result(timeout=SECONDS)
    seen["owner_goes_on"] = drawn(owner.sampling) == owner.tokens
    return seen


def granted(owner: Owner, other: tinker.ServiceClient, base_model: str, refused: dict[str, str]) -> dict[str, Any]:
    """Use of unpublished checkpoints with a key of their owner's as access token."""
    fresh = ready(other.create_lora_training_client(base_model, rank=4))
    seen: dict[str, Any] = {}
    for name, token in refused.items():
        seen[name] = [
            refusal(
                lambda: ready(
                    other.create_training_client_from_state(owner.weights, weights_access_token=token)  # noqa: B023
                )
            ),
            refusal(
                lambda: other.copy_weights(owner.sampler, weights_access_token=token).result(timeout=SECONDS)  # noqa: B023
            ),
            refusal(
                lambda: fresh.load_state(owner.weights, weights_access_token=token).result(timeout=SECONDS)  # noqa: B023
            ),
        ]
    made = ready(other.create_training_client_from_state(owner.weights, weights_access_token=owner.key))
    seen["created"] = loss_of(made) == owner.loss
    fresh.load_state(owner.weights, weights_access_token=owner.key).result(timeout=SECONDS)
    seen["loaded"] = loss_of(fresh) == owner.loss
    copy = other.copy_weights(owner.sampler, weights_access_token=owner.key).result(timeout=SECONDS)
    seen["copied"] = drawn(ready(other.create_sampling_client(model_path=copy))) == owner.tokens
    return seen


def as_told(owner: Owner, url: str, base_model: str, key: str, page: Path) -> dict[str, Any]:
    """Use of an unpublished checkpoint as the page's program has it, in a client that has a key and no project."""
    os.environ.update(TINKER_BASE_URL=url, TINKER_API_KEY=key)
    os.environ.pop("TINKER_PROJECT_ID", None)
    client = tinker.ServiceClient()
    fresh = ready(client.create_lora_training_client(base_model, rank=4))
    names = {"tinker": tinker, "training_client": fresh, "path": owner.weights, "key": owner.key}
    before = len(client.create_rest_client().list_user_checkpoints().result(timeout=SECONDS).checkpoints)
    exec(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0], names)
    after = len(client.create_rest_client().list_user_checkpoints().result(timeout=SECONDS).checkpoints)
    return {"same_loss": loss_of(fresh) == owner.loss, "copies": after - before}


def main() -> dict[str, Any]:
    """Run the four stories."""
    url, base_model, owner_key, viewer_key, other_key, project, page = sys.argv[1:]
    owner = Owner(url, base_model, owner_key)
    other = tinker.ServiceClient(base_url=url, api_key=other_key, project_id=project)
    refused = {"viewer": viewer_key, "no_key": "tml-wrong", "own": other_key}
    return {
        "published": published(owner, other),
        "copied": copied(owner, other, project),
        "granted": granted(owner, other, base_model, refused),
        "as_told": as_told(owner, url, base_model, other_key, Path(page)),
    }


if __name__ == "__main__":
    from sdk_end import end

    end(main())
