"""Replicas of several pools and base models have names, and folders, of their own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.base_model import BaseModelFacts, read_base_model_facts
from store.data_folder import DataFolder
from store.settings import Settings
from workers.sampling.replica_sources import ExternalVllm, ReplicaSource, vllm_sources

URL = "http://gpu:8000"


@pytest.fixture
def bases(tiny_model_dir: Path) -> tuple[BaseModelFacts, BaseModelFacts]:
    facts = read_base_model_facts("org/one", tiny_model_dir, None)
    return facts, replace(facts, name="org/other")


def sources(pool: str, facts: BaseModelFacts, folder: Path) -> Sequence[ReplicaSource]:
    settings = Settings(pool_name=pool, vllm_urls=(URL,), vllm_replicas=2)
    return vllm_sources(settings, facts, DataFolder(folder))


def test_a_pools_name_stands_before_its_replicas(bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path) -> None:
    alone = [source.name for source in sources("", bases[0], tmp_path)]
    assert alone == ["vllm-gpu:8000", "vllm-0", "vllm-1"]
    assert [source.name for source in sources("pool-1", bases[0], tmp_path)] == [f"pool-1/{name}" for name in alone]


def test_no_two_replicas_write_to_one_folder(bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path) -> None:
    external = [
        source
        for facts in bases
        for pool in ("pool-0", "pool-1")
        for source in sources(pool, facts, tmp_path)
        if isinstance(source, ExternalVllm)
    ]
    folders = {source.settings.zero_adapter for source in external}
    assert len(folders) == len(external) == 4
    assert {folder.parent for folder in folders} == {tmp_path / "zero-adapters"}
