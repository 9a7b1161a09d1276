"""A vLLM server computes positions as the trainer does: it chooses LongRoPE's factors by the length that it is started with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import InvalidRequest
from engine.sampling.vllm.process import VllmProcessSettings
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.served_length import served_length
from tests.engine.model.rotary_bases import ORIGINAL, OWN, config_of
from tests.engine.sampling.vllm.scripted import ScriptedServer, scripted_settings


@pytest.mark.parametrize(
    ("own", "context", "length"),
    [(ORIGINAL, ORIGINAL, ORIGINAL), (OWN, OWN, OWN + 1), (OWN, ORIGINAL - 1, ORIGINAL + 1)],
)
def test_a_server_is_started_with_a_length_at_which_it_has_the_factors_of_weft(
    own: int, context: int, length: int, tmp_path: Path
) -> None:
    config_of("longrope", own).save_pretrained(tmp_path)
    settings = VllmProcessSettings(
        command=("vllm",),
        model=tmp_path,
        served_model="turning",
        log=tmp_path / "log",
        context_length=context,
        max_lora_rank=8,
        max_loras=2,
        max_cpu_loras=4,
        on_cpu=False,
    )
    line = settings.arguments(tmp_path / "socket")
    assert line[line.index("--max-model-len") + 1] == str(length)


@pytest.mark.parametrize(("own", "length", "says"), [(OWN, ORIGINAL, "least 65"), (ORIGINAL, ORIGINAL + 1, "most 64")])
async def test_a_server_of_somebody_elses_with_other_factors_is_refused(
    own: int, length: int, says: str, scripted: ScriptedServer, world: Any, tmp_path: Path
) -> None:
    """The same server is taken for another base."""
    config_of("longrope", own).save_pretrained(tmp_path)
    scripted.models[0]["max_model_len"] = length
    settings = scripted_settings(scripted, world.base.facts, tmp_path)
    turning = VllmReplica(replace(settings, base=replace(settings.base, path=tmp_path)))
    try:
        with pytest.raises(InvalidRequest, match=f"max model length is {length} .* at {says}"):
            await turning.start()
    finally:
        await turning.close()
    other = VllmReplica(settings)
    await other.start()
    await other.close()


@pytest.mark.parametrize(
    ("own", "asked", "served"),
    [
        (ORIGINAL, ORIGINAL + 1, ORIGINAL),
        (ORIGINAL, 33, 33),
        (OWN, OWN + 1, OWN + 1),
        (OWN, ORIGINAL, ORIGINAL + 1),
        (OWN, 33, ORIGINAL + 1),
    ],
)
def test_a_server_is_given_the_length_at_which_it_has_the_same_factors(
    own: int, asked: int, served: int, tmp_path: Path
) -> None:
    """A server has the long factors beyond the original length, and weft for a base whose own context is beyond it."""
    config_of("longrope", own).save_pretrained(tmp_path)
    assert served_length(tmp_path, asked) == served


@pytest.mark.parametrize("form", ["newest", "old", "by layer", "inner"])
def test_the_length_is_read_from_every_form_of_config(form: str, tmp_path: Path) -> None:
    rope: dict[str, object] = {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL}
    config: dict[str, object] = {"vocab_size": 97, "max_position_embeddings": OWN}
    match form:
        case "newest":
            config |= {"rope_parameters": rope}
        case "old":
            config |= {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": ORIGINAL}
        case "by layer":
            config |= {"rope_parameters": {"sliding_attention": {"rope_type": "default"}, "full_attention": rope}}
        case _:
            config = {"text_config": config | {"rope_parameters": rope}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert served_length(tmp_path, 33) == ORIGINAL + 1


def test_other_bases_are_served_with_the_length_that_was_asked_for(tmp_path: Path) -> None:
    assert served_length(tmp_path / "none", 129) == 129
    config_of("dynamic").save_pretrained(tmp_path)
    assert [served_length(tmp_path, length) for length in (33, ORIGINAL + 1)] == [33, ORIGINAL + 1]
