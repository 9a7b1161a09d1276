"""Samples of a base with LongRoPE: a neighbour's length changes neither what is drawn nor what is reported."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.model.adapter_folder import read_lora_weights
from engine.model.lora import AdapterSegment
from tests.engine.model.rotary_bases import ORIGINAL, config_of, load_base, write_base
from tests.engine.sampling.conftest import Adapted, make_adapter
from tests.engine.sampling.drawing import RANDOM, Drawn

PROMPT = list(range(20))
LONG = [token % 97 for token in range(ORIGINAL + 26)]
TOLERANCE = 1e-4


@pytest.fixture
def cat_and_dog(tmp_path: Path) -> tuple[Adapted, Adapted]:
    """Adapters on a base with LongRoPE, in the folder ``base``."""
    folder = write_base(config_of("longrope"), tmp_path / "base")
    cat = make_adapter(folder, tmp_path / "cat", "cat", 1, 8, ("qkv_proj", "o_proj"))
    return cat, make_adapter(folder, tmp_path / "dog", "dog", 2, 4, ("qkv_proj",))


def test_a_long_neighbour_changes_nothing(tmp_path: Path, cat_and_dog: tuple[Adapted, Adapted], serve: Any) -> None:
    """Nor does the sequence's own growth: its first tokens' keys stay in the cache as they were computed."""
    base = load_base(tmp_path / "base")
    cat, dog = cat_and_dog
    params = replace(RANDOM, max_tokens=ORIGINAL)

    async def alone(client: Any) -> Drawn:
        drawn: Drawn = await client.ask(PROMPT, cat, params)
        return drawn

    async def together(client: Any) -> Drawn:
        drawn, *_ = await asyncio.gather(client.ask(PROMPT, cat, params), client.ask(LONG, dog, params))
        return drawn

    mine, beside = serve(base, alone).only, serve(base, together).only
    assert beside.ids == mine.ids
    np.testing.assert_allclose(beside.logprobs, mine.logprobs, atol=TOLERANCE)
    assert cat.version is not None
    loaded = read_lora_weights(cat.version.directory, base)
    with torch.no_grad(), base.adapters([AdapterSegment(loaded, 0, 1)]):
        table = base.logits(torch.tensor([PROMPT + mine.ids]))[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    expected = table[torch.arange(len(mine.ids)), torch.tensor(mine.ids)]
    np.testing.assert_allclose(mine.logprobs, expected.numpy(), atol=TOLERANCE)
