"""Uses that tinker-cookbook 0.6.1 makes of the SDK and the service outside its recipes; run as a script.

    PYTHONPATH=COOKBOOK TINKER_API_KEY=KEY TINKER_BASE_URL=URL HF_ENDPOINT=URL HF_TOKEN=KEY \\
        python sdk_cookbook_parts.py BASE_MODEL FOLDER

Prints one JSON line: for each part an empty string, or the service's refusal.
"""

import asyncio
import logging
import sys
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import tinker
from tinker_cookbook import checkpoint_utils, renderers, tokenizer_utils
from tinker_cookbook.chat_app.tinker_chat_cli import ChatSession
from tinker_cookbook.scripts import copy_checkpoint, save_audit_log
from tinker_cookbook.utils.git_rev import recipe_user_metadata
from tinker_cookbook.utils.session_naming import resolve_session_display_name

PROMPT = list(b"The cat says ")
RENDERER = "role_colon"


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


async def chat(world: World) -> None:
    """A conversation with the base and with an adapter."""
    renderer = renderers.get_renderer(RENDERER, tokenizer_utils.get_tokenizer(world.base_model))
    for path in (None, world.sampler_path):
        sampler = world.service.create_sampling_client(base_model=world.base_model, model_path=path).result()
        session = ChatSession(sampler, renderer, max_tokens=8, temperature=0.7, top_p=0.9)
        for _ in range(2):
            session.add_user_message("What does the cat say?")
            answer = await session.generate_response()
            assert "Error" not in answer
            session.add_assistant_message(answer)


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
    "chat": chat,
    "images": images,
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
