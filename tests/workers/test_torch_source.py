"""The in-process replica has its source's name: else its watcher would start another one every few seconds."""

from pathlib import Path

import pytest

from contracts.base_model import read_base_model_facts
from engine.model.base import BaseModel
from store.settings import Settings
from workers.torch_source import TorchSource


@pytest.mark.parametrize(("pool", "name"), [("", "torch:weft/tiny"), ("pool-1", "pool-1/torch:weft/tiny")])
async def test_the_replica_goes_by_the_name_of_its_source(tiny_model_dir: Path, pool: str, name: str) -> None:
    base = BaseModel.load(read_base_model_facts("weft/tiny", tiny_model_dir, None))
    source = TorchSource(base, Settings(pool_name=pool))
    replica = await source.start()
    try:
        assert replica.name == source.name == name
    finally:
        await replica.close()
