"""Every use that tinker-cookbook 0.6.1 makes of the SDK and the service, module by module; run as a script.

    PYTHONPATH=COOKBOOK TINKER_API_KEY=KEY TINKER_BASE_URL=URL HF_ENDPOINT=URL HF_TOKEN=KEY \\
        python sdk_cookbook_loops.py BASE_MODEL FOLDER

Modules that can be imported without the package's other dependencies run as they are. The others' calls are made by hand, in
their order and with their arguments. Prints one JSON line: for each part an empty string, or the service's refusal.
"""

import asyncio
import logging
import sys
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker_cookbook import checkpoint_utils, tokenizer_utils
from tinker_cookbook.scripts import copy_checkpoint, save_audit_log
from tinker_cookbook.utils.git_rev import recipe_user_metadata
from tinker_cookbook.utils.session_naming import resolve_session_display_name

PROMPT = list(b"The cat says ")
WORD = list(b"meow meow")
ADAM = tinker.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
RENDERER = "role_colon"
TOPK = 3


@dataclass
class World:
    """Clients that the parts share, and a training checkpoint of ``trainer``."""

    service: tinker.ServiceClient
    base_model: str
    folder: Path
    trainer: tinker.TrainingClient
    state: str
    sampler_path: str


def run_metadata() -> dict[str, str]:
    """Metadata of a run, as the loops make it."""
    metadata = {"wandb_link": "none"}
    checkpoint_utils.add_renderer_name_to_user_metadata(metadata, RENDERER)
    return metadata


def supervised(prompt: list[int] = PROMPT, word: list[int] = WORD) -> tinker.Datum:
    """A datum as ``datum_from_model_input_weights`` makes it: the word has weight, the prompt has none."""
    tokens = [*prompt, *word]
    weights = torch.tensor([0.0] * (len(prompt) - 1) + [1.0] * len(word))
    inputs = {
        "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
        "weights": tinker.TensorData.from_torch(weights),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def sequence_of(datum: tinker.Datum) -> tinker.ModelInput:
    """The whole sequence that a datum was made of."""
    return datum.model_input.append_int(int(datum.loss_fn_inputs["target_tokens"].data[-1]))


def rollout(sampled: tinker.SampledSequence, advantage: float, *, named: bool = False) -> tinker.Datum:
    """A datum as ``rl.data_processing`` makes it, without its mask; ``named``: with provenance in place of logprobs."""
    tokens, skipped = [*PROMPT, *sampled.tokens], [0.0] * (len(PROMPT) - 1)
    assert sampled.logprobs is not None
    length = len(sampled.tokens)
    values = {
        "logprobs": torch.tensor(skipped + list(sampled.logprobs)),
        "advantages": torch.tensor(skipped + [advantage] * length),
    }
    inputs = {name: tinker.TensorData.from_torch(value) for name, value in values.items()}
    inputs["target_tokens"] = tinker.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1])
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    if not named:
        return datum
    prompt, drawn = tinker.types.PromptProvenanceSpan, tinker.types.SampledProvenanceSpan
    name = sampled.sequence_id
    return datum.with_provenance(
        model_input=[prompt(sequence_id=name, length=len(PROMPT)), drawn(sequence_id=name, length=length - 1)],
        loss_fn_inputs=[
            prompt(sequence_id=name, offset=1, length=len(PROMPT) - 1),
            drawn(sequence_id=name, length=length),
        ],
    )


async def drawn(sampler: tinker.SamplingClient, count: int = 2) -> list[tinker.SampledSequence]:
    """Draw as ``TinkerTokenCompleter`` does: a request for each, with a stop sequence."""
    params = tinker.SamplingParams(stop=["\n\nUser:"], max_tokens=6, temperature=1.0)
    prompt = tinker.ModelInput.from_ints(PROMPT)
    answers = await asyncio.gather(
        *[sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).coroutine() for _ in range(count)]
    )
    assert all(answer.prompt_cache_hit_tokens >= 0 for answer in answers)
    found = [answer.sequences[0] for answer in answers]
    assert all(one.logprobs is not None and len(one.logprobs) == len(one.tokens) for one in found)
    return found


async def stepped(world: World, batches: list[list[tinker.Datum]], loss: str, config: dict[str, Any] | None) -> None:
    """Train as ``rl.train.train_step`` does: each substep is sent before the one before it is awaited."""
    sent = []
    for batch in batches:
        computed = world.trainer.forward_backward(batch, loss_fn=loss, loss_fn_config=config)  # type: ignore[arg-type]
        sent.append((computed, world.trainer.optim_step(ADAM)))
    for computed, step in sent:
        outputs = (await computed).loss_fn_outputs
        assert all(output["logprobs"].to_torch().isfinite().all() for output in outputs)
        await step


# --- parts that run as they are -----------------------------------------------------------------------------------------------


async def checkpoints(world: World) -> None:
    """Periodic and rolling saves, the run found by a path, the renderer's name, the resume from the file."""
    log = world.folder / "log"
    log.mkdir()
    manager = checkpoint_utils.CheckpointManager(
        world.trainer, world.service, str(log), save_every=2, rolling_save_every=1, rolling_ttl_seconds=600
    )
    for step in (1, 2, 3):
        await manager.maybe_save_async(step, {"batch": step})
    await manager.save_final_async({"batch": 3, "final": True})
    last = checkpoint_utils.get_last_checkpoint(str(log))
    assert last is not None
    assert last.state_path is not None
    await checkpoint_utils.check_renderer_name_for_checkpoint_async(world.service, last.state_path, RENDERER)
    name = await checkpoint_utils.resolve_renderer_name_from_checkpoint_or_default_async(
        model_name=world.base_model, explicit_renderer_name=None, load_checkpoint_path=last.state_path
    )
    assert name == RENDERER
    run = last.state_path.removeprefix("tinker://").partition("/")[0]
    kept = (await world.service.create_rest_client().list_checkpoints(run)).checkpoints
    names = sorted(one.checkpoint_id for one in kept)
    assert [one for one in names if "final" in one] == ["sampler_weights/final", "weights/final"]
    assert [one for one in names if one.startswith("weights/0000")] == ["weights/000002"], "rolling ones are gone"


async def tokenizers(world: World) -> None:
    """The tokenizer of the base, from the service itself."""
    tokenizer = tokenizer_utils.get_tokenizer(world.base_model)
    assert tokenizer.decode(tokenizer.encode("cats")) == "cats"


async def copies(world: World) -> None:
    """A checkpoint copied into a run of its own."""
    await asyncio.to_thread(copy_checkpoint.copy_checkpoint, world.state, None, None, "copied", "training")


async def audit(world: World) -> None:
    """A day's audit log."""
    client = tinker.AdminClient()
    await asyncio.to_thread(save_audit_log.fetch_and_save_day, client, world.folder, date(2026, 1, 1))


# --- parts whose calls are made by hand ---------------------------------------------------------------------------------------


async def sl_train(world: World) -> None:
    """Pipelined steps; both evaluators of ``nll_evaluator``; a sampler for the others."""
    await stepped(world, [[supervised()] * 2, [supervised()]], "cross_entropy", None)
    scored = await world.trainer.forward([supervised()], loss_fn="cross_entropy")
    sampler = await world.trainer.save_weights_and_get_sampling_client()
    logprobs = await sampler.compute_logprobs(sequence_of(supervised()))
    assert logprobs[0] is None
    expected = scored.loss_fn_outputs[0]["logprobs"].to_torch()
    assert torch.allclose(torch.tensor(logprobs[1:]), expected, atol=1e-3)


async def rl_in_step(world: World) -> None:
    """Steps on policy with a reference's KL; importance sampling, PPO with its config."""
    reference = world.service.create_sampling_client(base_model=world.base_model, model_path=None).result()
    for loss, config in (("importance_sampling", None), ("ppo", {"clip_low_threshold": 0.8})):
        sampler = await world.trainer.save_weights_and_get_sampling_client(record_stability_info=False)
        found = await drawn(sampler, 4)
        data = [rollout(one, sign) for one, sign in zip(found, (1.0, -1.0, 0.5, -0.5), strict=True)]
        params = tinker.SamplingParams(max_tokens=1)
        scored = await asyncio.gather(
            *[
                reference.sample(
                    prompt=sequence_of(datum), num_samples=1, sampling_params=params, include_prompt_logprobs=True
                ).coroutine()
                for datum in data
            ]
        )
        assert all(len(one.prompt_logprobs or []) == sequence_of(data[0]).length for one in scored[:1])
        await stepped(world, [data[:2], data[2:]], loss, config)


async def rl_off_policy(world: World) -> None:
    """Asynchronous training: recorded samples of an older sampler, several minibatches in a step, ``stable_reinforce``."""
    paths = await checkpoint_utils.save_checkpoint_async(
        world.trainer, "async", str(world.folder), {"batch": 0}, kind="both", ttl_seconds=600
    )
    sampler = world.trainer.create_sampling_client(paths["sampler_path"], record_stability_info=True).result()
    old = await drawn(sampler)
    newer = await world.trainer.save_weights_and_get_sampling_client(record_stability_info=True)
    new = await drawn(newer)
    sent = [
        world.trainer.forward_backward([rollout(one, 1.0, named=True)], loss_fn="stable_reinforce")
        for one in (*old, *new)
    ]
    step = world.trainer.optim_step(ADAM)
    for computed in sent:
        assert torch.isfinite(torch.tensor((await computed).metrics["loss:sum"]))
    await step


async def dpo(world: World) -> None:
    """A reference of the run's own first weights, and a custom loss over pairs."""
    reference = world.trainer.save_weights_and_get_sampling_client().result()
    chosen, rejected = supervised(), supervised(word=list(b"woof woof"))
    told = await asyncio.gather(
        *[reference.compute_logprobs(sequence_of(one)).coroutine() for one in (chosen, rejected)]
    )
    of_reference = [torch.tensor(one[1:]) for one in told]

    def loss(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        margins = [
            ((own - ref) * weight).sum() for own, ref, weight in zip(logprobs, of_reference, weights, strict=True)
        ]
        found = -torch.nn.functional.logsigmoid(0.1 * (margins[0] - margins[1]))
        return found, {"dpo_loss": float(found)}

    computed = world.trainer.forward_backward_custom([chosen, rejected], loss).result()
    world.trainer.optim_step(ADAM).result()
    assert abs(computed.metrics["dpo_loss"] - 0.6931) < 1e-2, "the run is its own reference"


async def on_policy_distillation(world: World) -> None:
    """A teacher's logprobs of what the student drew, as advantages."""
    teacher = world.service.create_sampling_client(base_model=world.base_model, model_path=None).result()
    student = await world.trainer.save_weights_and_get_sampling_client()
    data = [rollout(one, 0.0) for one in await drawn(student)]
    told = await asyncio.gather(*[teacher.compute_logprobs(sequence_of(one)).coroutine() for one in data])
    for datum, logprobs in zip(data, told, strict=True):
        own = datum.loss_fn_inputs["logprobs"].to_torch()
        advantages = (torch.tensor(logprobs[1:]) - own) * (own != 0)
        datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_torch(advantages)
    await stepped(world, [data], "importance_sampling", None)


async def soft_targets(teacher: tinker.SamplingClient, datum: tinker.Datum) -> tinker.Datum:
    """The teacher's likeliest tokens and their shares, (N, K), as ``_build_topk_datum`` makes them."""
    response = await teacher.sample(
        prompt=sequence_of(datum),
        num_samples=1,
        sampling_params=tinker.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=TOPK,
    )
    places = (response.topk_prompt_logprobs or [])[1:]
    tokens = torch.tensor([[token for token, _ in place or []] for place in places])
    shares = torch.tensor([[logprob for _, logprob in place or []] for place in places]).softmax(-1)
    inputs = {
        "target_tokens": tinker.TensorData.from_torch(tokens),
        "weights": tinker.TensorData.from_torch(shares * datum.loss_fn_inputs["weights"].to_torch()[:, None]),
    }
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


async def off_policy_distillation(world: World) -> None:
    """Cross entropy against a teacher's likeliest tokens; the teacher by path and by name."""
    by_path = world.service.create_sampling_client(base_model=world.base_model, model_path=world.sampler_path).result()
    by_name = world.service.create_sampling_client(base_model=world.base_model).result()
    data = [await soft_targets(teacher, supervised()) for teacher in (by_path, by_name)]
    await stepped(world, [data], "cross_entropy", None)


async def self_distillation(world: World) -> None:
    """Reverse KL of (N, K) logprobs as a custom loss, pipelined; the teacher is replaced by a later save."""
    saved = await world.trainer.save_weights_for_sampler("teacher")
    teacher = world.service.create_sampling_client(base_model=world.base_model, model_path=saved.path).result()
    datum = await soft_targets(teacher, supervised())

    def loss(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        shares = data[0].loss_fn_inputs["weights"].to_torch()
        own, is_asked = logprobs[0].log_softmax(-1), shares > 0
        far = torch.where(is_asked, own - shares.clamp(min=1e-30).log(), 0.0).detach()
        found = (own.exp() * far * is_asked).sum()
        return found, {"sdft/reverse_kl_loss": float(found)}

    sent = [(world.trainer.forward_backward_custom([datum], loss), world.trainer.optim_step(ADAM)) for _ in range(2)]
    for computed, step in sent:
        assert "sdft/reverse_kl_loss" in (await computed).metrics
        await step


async def evaluators(world: World) -> None:
    """Samples for evaluators, ``inspect`` and the chat, by path and by name, with stop tokens and several samples."""
    by_path = world.service.create_sampling_client(model_path=world.sampler_path, base_model=None).result()
    by_name = world.service.create_sampling_client(base_model=world.base_model).result()
    params = tinker.SamplingParams(max_tokens=4, temperature=0.6, top_p=0.9, top_k=-1, stop=[10], seed=1)
    for sampler in (by_path, by_name):
        found = await sampler.sample(prompt=tinker.ModelInput.from_ints(PROMPT), num_samples=2, sampling_params=params)
        assert len(found.sequences) == 2
        assert sampler.get_base_model() == world.base_model


async def resumed(world: World) -> None:
    """A run gone on with, by the two ways of the loops, and where it came from."""
    metadata = run_metadata()
    again = await world.service.create_training_client_from_state_with_optimizer_async(
        world.state, user_metadata=metadata
    )
    fresh = await world.service.create_training_client_from_state_async(world.state, user_metadata=metadata)
    for trainer in (again, fresh):
        path = (await trainer.save_state("resumed", ttl_seconds=600)).path
        await checkpoint_utils.check_renderer_name_for_checkpoint_async(world.service, path, RENDERER)


async def images(world: World) -> None:
    """A prompt with an image."""
    sampler = world.service.create_sampling_client(base_model=world.base_model).result()
    image = tinker.types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=1)
    prompt = tinker.ModelInput(chunks=[tinker.types.EncodedTextChunk(tokens=PROMPT), image])
    await sampler.sample(prompt=prompt, num_samples=1, sampling_params=tinker.SamplingParams(max_tokens=1))


PARTS: dict[str, Callable[[World], Awaitable[None]]] = {
    "checkpoint_utils": checkpoints,
    "tokenizer_utils": tokenizers,
    "scripts.copy_checkpoint": copies,
    "scripts.save_audit_log": audit,
    "supervised.train, supervised.nll_evaluator": sl_train,
    "rl.train in step, completers, rl.metrics": rl_in_step,
    "rl.train asynchronous, rl.data_processing": rl_off_policy,
    "preference.train_dpo": dpo,
    "distillation.train_on_policy": on_policy_distillation,
    "distillation.train_off_policy": off_policy_distillation,
    "distillation.sdft": self_distillation,
    "eval, preference.types, chat_app": evaluators,
    "resume of each loop": resumed,
    "scripts.inkling, renderers with images": images,
}


async def main(base_model: str, folder: Path) -> dict[str, str]:
    """Run every part and return what was refused."""
    name = resolve_session_display_name(session_name=None, wandb_name="x" * 300)
    service = tinker.ServiceClient(user_metadata=recipe_user_metadata("test"), display_name=name)
    metadata = run_metadata()
    trainer = await service.create_lora_training_client_async(base_model, rank=4, user_metadata=metadata)
    state = (await trainer.save_state("start", ttl_seconds=3600)).path
    sampler = (await trainer.save_weights_for_sampler("start", ttl_seconds=3600)).path
    assert sampler is not None
    world = World(service, base_model, folder, trainer, state, sampler)
    outcomes = {}
    for part, use in PARTS.items():
        try:
            await use(world)
            outcomes[part] = ""
        except (tinker.APIStatusError, tinker.RequestFailedError) as refused:
            outcomes[part] = str(refused)
    return outcomes


if __name__ == "__main__":
    from sdk_end import end

    warnings.simplefilter("ignore", FutureWarning)
    logging.basicConfig(level=logging.WARNING)
    end(asyncio.run(main(sys.argv[1], Path(sys.argv[2]))))
