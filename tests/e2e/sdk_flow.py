"""One whole story through the public ``tinker`` SDK: train, sample, save, list, download, delete.

    python sdk_flow.py BASE_URL API_KEY BASE_MODEL

A script, so that any SDK version can run it. Prints one JSON line of what was seen. All calls exist from SDK 0.6.3 on, but for
those of ``downloads``.
"""

import io
import sys
import tarfile
import urllib.request
import warnings
from typing import Any

import tinker
from tinker import types

PROMPT = [84, 104, 101, 32]
WORD = [109, 101, 111, 119]
LEARNING_RATE = 3e-3


def tensor(values: list[float] | list[int], dtype: str, shape: list[int] | None = None) -> types.TensorData:
    """A ``TensorData`` of the given values."""
    return types.TensorData(data=values, dtype=dtype, shape=shape or [len(values)])


def datum(tokens: list[int], **inputs: types.TensorData) -> types.Datum:
    """Next-token prediction over ``tokens`` with further loss inputs."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tensor(tokens[1:], "int64"), **inputs},
    )


def supervised(tokens: list[int]) -> types.Datum:
    """All positions weigh 1."""
    return datum(tokens, weights=tensor([1.0] * (len(tokens) - 1), "float32"))


def train(trainer: tinker.TrainingClient, steps: int) -> list[float]:
    """Cross-entropy steps, pipelined as the cookbook does; returns the losses."""
    losses = []
    for _ in range(steps):
        computed = trainer.forward_backward([supervised(PROMPT + WORD * 3)], "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
        losses.append(computed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def chunks_agree(trainer: tinker.TrainingClient) -> bool:
    """1,030 sequences go out as two chunks, the first one last; outputs must come back in order."""
    data = [supervised([*PROMPT, 97 + index % 26]) for index in range(1030)]
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    first = outputs[:26]
    same = all(
        abs(output["logprobs"].data[-1] - first[index % 26]["logprobs"].data[-1]) < 1e-4
        for index, output in enumerate(outputs)
    )
    return len(outputs) == 1030 and same


def every_loss(trainer: tinker.TrainingClient) -> dict[str, float]:
    """Each RL loss once, at ratio 1, plus a custom loss."""
    tokens = PROMPT + WORD
    length = len(tokens) - 1
    now = trainer.forward([supervised(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    rl = datum(tokens, logprobs=tensor(list(now), "float32"), advantages=tensor([1.0] * length, "float32"))
    losses = {}
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        config = {"beta": 0.05} if name == "dro" else None
        losses[name] = trainer.forward_backward([rl], name, config).result().metrics["loss:sum"]
    return losses


def custom_loss(trainer: tinker.TrainingClient) -> dict[str, float]:
    """A client-side torch loss."""

    def negative_log_likelihood(data, logprobs):  # type: ignore[no-untyped-def]
        loss = -sum(row.sum() for row in logprobs)
        return loss, {"mine": float(loss)}

    return dict(trainer.forward_backward_custom([supervised(PROMPT + WORD)], negative_log_likelihood).result().metrics)


def fetched(url: str) -> bytes:
    """The bytes behind a link, asked for as the SDK's command does."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return bytes(answer.read())


def downloads(trainer: Any, rest: Any, path: str) -> dict[str, list[int]]:
    """Each way to download weights that this SDK has: sizes of ``adapter_config.json`` and of the weights."""
    wanted = ("adapter_config.json", "adapter_model.safetensors")
    found: dict[str, list[int]] = {}
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        link = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
        with tarfile.open(fileobj=io.BytesIO(fetched(link.url))) as archive:
            sizes = {member.name.rpartition("/")[2]: member.size for member in archive.getmembers()}
        found["archive"] = [sizes[name] for name in wanted]
    if hasattr(trainer, "save_weights_external"):
        external = trainer.save_weights_external("external").result().path
        urls = rest.get_external_weights_urls(external).result().urls
        found["external"] = [len(fetched(urls[name])) for name in wanted]
        rest.delete_checkpoint_from_tinker_path(external).result()
    return found


def lists(rest: Any, run_id: str, path: str) -> dict[str, object]:
    """Return the lists and looks-up of one run and its sampler checkpoint."""
    sessions = rest.list_sessions().result().sessions
    session = rest.get_session(run_id.partition(":")[0]).result()
    info = rest.get_weights_info_by_tinker_path(path).result()
    mine = [item for item in rest.list_user_checkpoints().result().checkpoints if item.tinker_path == path]
    return {
        "runs": [run.training_run_id for run in rest.list_training_runs(limit=100).result().training_runs],
        "run": rest.get_training_run_by_tinker_path(path).result().training_run_id,
        "rank": [rest.get_training_run(run_id).result().lora_rank, info.lora_rank],
        "checkpoints": sorted(item.checkpoint_id for item in rest.list_checkpoints(run_id).result().checkpoints),
        "of_user": [item.checkpoint_type for item in mine],
        "session": run_id.partition(":")[0] in sessions and run_id in session.training_run_ids,
    }


def main(base_url: str, api_key: str, base_model: str) -> dict[str, object]:
    """The story; see the test for what is expected of it."""
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    seen: dict[str, object] = {"sdk": tinker.__version__}
    seen["models"] = [model.model_name for model in service.get_server_capabilities().supported_models]
    trainer = service.create_lora_training_client(base_model=base_model, rank=8, seed=3)
    seen["info_model"] = trainer.get_info().model_data.model_name
    seen["losses"] = train(trainer, 40)
    seen["chunks_agree"] = chunks_agree(trainer)
    state = trainer.save_state("state").result().path
    seen["state"] = state
    resumed = service.create_training_client_from_state_with_optimizer(state)
    seen["resumed_loss"] = train(resumed, 1)[0]
    seen["next_loss"] = train(trainer, 1)[0]
    trainer.load_state_with_optimizer(state).result()
    seen["reloaded_loss"] = train(trainer, 1)[0]
    seen["rl_losses"] = every_loss(resumed)
    seen["custom"] = custom_loss(resumed)
    resumed.optim_step(types.AdamParams(learning_rate=1e-6)).result()

    named = trainer.save_weights_for_sampler("sampler").result().path
    prompt = types.ModelInput.from_ints(PROMPT)
    greedy = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])
    sampler = service.create_sampling_client(model_path=named)
    seen["adapter_says"] = list(sampler.sample(prompt, 1, greedy).result().sequences[0].tokens)
    fresh = trainer.save_weights_and_get_sampling_client("unnamed")
    seen["unnamed_says"] = list(fresh.sample(prompt, 1, greedy).result().sequences[0].tokens)
    base = service.create_sampling_client(base_model=base_model)
    seen["base_says"] = list(base.sample(prompt, 1, greedy).result().sequences[0].tokens)
    seeded = types.SamplingParams(max_tokens=8, temperature=1.0, seed=5, stop=[])
    several = [list(sequence.tokens) for sequence in base.sample(prompt, 3, seeded).result().sequences]
    again = [list(sequence.tokens) for sequence in base.sample(prompt, 3, seeded).result().sequences]
    seen["seed_repeats"] = several == again
    seen["samples_differ"] = len({tuple(tokens) for tokens in several}) > 1
    stopped = types.SamplingParams(max_tokens=12, temperature=0.0, stop=["ow"])
    seen["stopped"] = list(sampler.sample(prompt, 1, stopped).result().sequences[0].tokens)
    seen["prompt_logprobs"] = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT + WORD)).result()
    forward = trainer.forward([supervised(PROMPT + WORD)], "cross_entropy").result()
    seen["trainer_logprobs"] = list(forward.loss_fn_outputs[0]["logprobs"].data)
    rest = service.create_rest_client()
    run_id = state.removeprefix("tinker://").split("/")[0]
    seen["run"] = run_id
    seen["listed"] = lists(rest, run_id, named)
    seen["downloaded"] = downloads(trainer, rest, named)
    rest.delete_checkpoint_from_tinker_path(named).result()
    seen["checkpoints_left"] = [item.checkpoint_id for item in rest.list_checkpoints(run_id).result().checkpoints]
    return seen


if __name__ == "__main__":
    from sdk_end import end

    # 0.38 wants `.result()` on clients, which 0.18 returns themselves: the story is written for both.
    warnings.simplefilter("ignore", FutureWarning)
    end(main(*sys.argv[1:4]))
