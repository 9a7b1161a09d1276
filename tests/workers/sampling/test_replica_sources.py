"""Replicas of several pools and base models have names, and folders, of their own."""

import asyncio
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from contracts.base_model import BaseModelFacts, read_base_model_facts
from contracts.errors import EngineFailure, InvalidRequest
from engine.sampling.vllm.model_memory import ModelMemory
from engine.sampling.vllm.process import VllmProcess
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.server_memory import ServerMemory
from store.data_folder import DataFolder
from store.settings import Settings
from workers.sampling.replica_sources import ExternalVllm, ManagedVllm, ReplicaSource, vllm_servers, vllm_sources

URL = "http://gpu:8000"
COMMAND = ("vllm", "serve")
"""Given by all but one test: what a machine has is not asked for then."""


@pytest.fixture
def bases(tiny_model_dir: Path) -> tuple[BaseModelFacts, BaseModelFacts]:
    facts = read_base_model_facts("org/one", tiny_model_dir, None)
    return facts, replace(facts, name="org/other")


def sources(pool: str, facts: BaseModelFacts, folder: Path) -> Sequence[ReplicaSource]:
    settings = Settings(pool_name=pool, vllm_urls=(URL,), vllm_replicas=2, vllm_command=COMMAND)
    return vllm_sources(settings, facts, DataFolder(folder), trains_here=True)


def test_a_pools_name_stands_before_its_replicas(bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path) -> None:
    alone = [source.name for source in sources("", bases[0], tmp_path)]
    assert alone == ["server-0", "vllm-0", "vllm-1"]
    assert [source.name for source in sources("pool-1", bases[0], tmp_path)] == [f"pool-1/{name}" for name in alone]


def test_a_replicas_address_and_password_are_for_operators_only(
    bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tenant reads replicas' names in reports, and errors in failed futures."""
    with socket.socket() as silent:
        # Bound, and nobody listens.
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        urls = (f"http://user:secret@{address}", f"org/one=http://user:secret@{address}/#left")
        unnamed, named = vllm_sources(Settings(vllm_urls=urls), bases[0], DataFolder(tmp_path), trains_here=True)
        assert (unnamed.name, named.name) == ("server-0", "left")
        with caplog.at_level("INFO"):
            for source in (unnamed, named):
                with pytest.raises(EngineFailure) as failed:
                    asyncio.run(source.start())
                assert source.name in failed.value.message
                assert not any(part in failed.value.message for part in (address, "secret"))
    assert address in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("spec", ["gpu:8000", "http://user:secret@gpu#a b", "http://user:secret@gpu#vllm-0"])
def test_an_entry_of_another_form_is_refused_without_its_password(spec: str) -> None:
    with pytest.raises(InvalidRequest, match="entry 1") as refused:
        vllm_servers(("http://gpu", spec))
    assert "secret" not in refused.value.message


def test_two_replicas_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="left names two"):
        vllm_servers(("http://one#left", "http://two#left"))


def test_the_folders_of_adapters_that_change_nothing_are_as_many_as_the_bases(
    bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path
) -> None:
    """Pools' names may change with each start, and nobody removes the folders of those that are gone."""
    external = [
        source
        for facts in (*bases, replace(bases[0], name="org-one"))
        for pool in ("pool-0", "pool-1")
        for source in sources(pool, facts, tmp_path)
        if isinstance(source, ExternalVllm)
    ]
    folders = {source.settings.zero_adapter for source in external}
    assert (len(external), len(folders)) == (6, 3)
    assert {folder.parent for folder in folders} == {tmp_path / "zero-adapters"}


def test_every_sampler_gives_as_many_logprobs_as_a_tenant_may_ask_for(
    bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path
) -> None:
    """Servers count the drawn token's logprob, too. A smaller one is refused at the start, not at a tenant's sample."""
    settings = Settings(vllm_urls=(URL,), vllm_replicas=1, max_topk_logprobs=30, vllm_command=COMMAND)
    external, managed = vllm_sources(settings, bases[0], DataFolder(tmp_path), trains_here=True)
    assert isinstance(external, ExternalVllm)
    assert isinstance(managed, ManagedVllm)
    assert external.settings.max_logprobs == managed.process_settings.max_logprobs == 31


def test_a_server_has_the_precision_of_the_trainers_base(
    bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path
) -> None:
    for dtype, given in (("auto", "float32"), ("bfloat16", "bfloat16")):
        settings = Settings(vllm_replicas=1, base_dtype=dtype, vllm_command=COMMAND)
        (managed,) = vllm_sources(settings, bases[0], DataFolder(tmp_path), trains_here=True)
        assert isinstance(managed, ManagedVllm)
        assert managed.process_settings.dtype == given


def test_a_base_that_vllm_cannot_serve_with_adapters_is_refused_before_the_start(
    bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's kernels for adapters take half precision only on a GPU."""
    monkeypatch.setattr("workers.sampling.replica_sources.has_accelerator", lambda: True)
    settings = Settings(vllm_replicas=1, vllm_command=COMMAND)
    with pytest.raises(InvalidRequest, match="WEFT_BASE_DTYPE=bfloat16"):
        vllm_sources(settings, bases[0], DataFolder(tmp_path), trains_here=True)
    half = settings.model_copy(update={"base_dtype": "bfloat16"})
    vllm_sources(half, bases[0], DataFolder(tmp_path), trains_here=True)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_base_with_routed_experts_needs_an_accelerator_for_vllm_and_has_them_left_out_there(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, on_cpu: bool
) -> None:
    monkeypatch.setattr("workers.sampling.replica_sources.has_accelerator", lambda: not on_cpu)
    experts = {"model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}
    folder = tmp_path / "routed"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "model.safetensors").unlink()
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2), **experts}, folder / "model.safetensors")
    facts = read_base_model_facts("org/routed", folder, None)
    settings = Settings(vllm_replicas=1, vllm_command=COMMAND, base_dtype="bfloat16")
    if on_cpu:
        with pytest.raises(InvalidRequest, match="leave out WEFT_VLLM_REPLICAS"):
            vllm_sources(settings, facts, DataFolder(tmp_path), trains_here=True)
        return
    (managed,) = vllm_sources(settings, facts, DataFolder(tmp_path), trains_here=True)
    assert isinstance(managed, ManagedVllm)
    assert managed.process_settings.target_modules == ("q_proj",)


def test_a_server_is_started_by_the_command_that_is_set_or_else_by_the_one_found(
    bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one found is whole, so it does not matter from which folder weft itself is started."""
    found = ("/opt/found/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    monkeypatch.setattr("workers.sampling.replica_sources.find_server_command", lambda: found)
    for given, command in ((COMMAND, COMMAND), ((), found)):
        settings = Settings(vllm_replicas=1, vllm_command=given)
        (managed,) = vllm_sources(settings, bases[0], DataFolder(tmp_path), trains_here=True)
        assert isinstance(managed, ManagedVllm)
        assert managed.process_settings.command == command


async def test_a_server_that_takes_longer_than_is_set_is_ended(
    bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path
) -> None:
    deaf = (sys.executable, "-c", "import signal; signal.pause()")
    settings = Settings(vllm_replicas=1, vllm_command=deaf, vllm_start=timedelta(seconds=0.5))
    (managed,) = vllm_sources(settings, bases[0], DataFolder(tmp_path), trains_here=True)
    with pytest.raises(EngineFailure, match="was not healthy"):
        await managed.start()


async def test_a_server_that_starts_again_asks_for_the_memory_that_it_had(
    bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    had: list[int] = []

    class Started(VllmProcess):
        """A server that is up without a process."""

        async def start(self) -> None:
            need = self._settings.need
            assert need is not None
            had.append(need.had.given if need.had else 0)
            self.memory = ServerMemory(("a",), 30 + len(had), kv_cache=10, fraction=0.5)

    async def up(_: VllmReplica) -> None:
        """Leave the server unasked."""

    monkeypatch.setattr("workers.sampling.replica_sources.VllmProcess", Started)
    monkeypatch.setattr(VllmReplica, "start", up)
    settings = Settings(vllm_replicas=2, vllm_command=COMMAND)
    first, second = vllm_sources(settings, bases[0], DataFolder(tmp_path), trains_here=True)
    for source in (first, first, second, first):
        await source.start()
    assert had == [0, 31, 0, 32]


@pytest.mark.parametrize(("left", "resident"), [(10**15, 32), (80, 18), (0, 4)])
def test_a_server_keeps_as_many_adapters_as_the_hosts_memory_has_places_for(
    bases: tuple[BaseModelFacts, BaseModelFacts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: int,
    resident: int,
) -> None:
    """``left`` is in adapters. A fourth of it is theirs; two places are the zero adapter's and a spare one."""
    one = ModelMemory.read(bases[0].path, dtype="float32", max_rank=8, adapters=1).adapters
    monkeypatch.setattr("workers.sampling.replica_sources.available_memory", lambda: left * one)
    settings = Settings(vllm_urls=(URL,), vllm_replicas=1, vllm_max_loras=4, max_rank=8, vllm_command=COMMAND)
    external, managed = vllm_sources(settings, bases[0], DataFolder(tmp_path), trains_here=True)
    assert isinstance(external, ExternalVllm)
    assert isinstance(managed, ManagedVllm)
    need = managed.process_settings.need
    assert need is not None
    assert need.resident == (resident + 2) * one
    assert managed.settings.max_resident == resident
    assert managed.process_settings.max_cpu_loras == resident + 2
    command = managed.process_settings.arguments(tmp_path / "socket")
    assert command[command.index("--max-cpu-loras") + 1] == str(resident + 2)
    # The memory of another's server is not known here.
    assert external.settings.max_resident == 32


@pytest.mark.parametrize("head", [False, True])
def test_options_that_change_a_servers_memory_are_reckoned_with(
    bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path, *, head: bool
) -> None:
    arguments = ("--tensor-parallel-size=2", "--pipeline-parallel-size", "3", "--max-num-batched-tokens", "512")
    settings = Settings(
        vllm_replicas=1, vllm_command=COMMAND, vllm_arguments=arguments, vllm_head_adapters=head, vllm_sequences=7
    )
    (source,) = vllm_sources(settings, bases[0], DataFolder(tmp_path), trains_here=True)
    assert isinstance(source, ManagedVllm)
    need = source.process_settings.need
    assert need is not None
    assert (need.gpus_each, need.stages, need.batched_tokens, need.sequences) == (6, 3, 512, 7)
    assert (need.model.head > 0, need.model.embedding > 0) == (head, head)
    assert need.scores_prompts is not head


@pytest.mark.parametrize(("rank", "served"), [(8, 8), (9, 16), (48, 64), (257, 320), (512, 512), (513, None)])
def test_a_server_is_started_with_a_rank_that_vllm_has(
    bases: tuple[BaseModelFacts, BaseModelFacts], tmp_path: Path, rank: int, served: int | None
) -> None:
    """vLLM ends at the start with any other number. Its places for adapters are reckoned at that rank."""
    settings = Settings(vllm_replicas=1, vllm_command=COMMAND, max_rank=rank)
    if served is None:
        with pytest.raises(InvalidRequest, match="WEFT_MAX_RANK is 513"):
            vllm_sources(settings, bases[0], DataFolder(tmp_path), trains_here=True)
        return
    (source,) = vllm_sources(settings, bases[0], DataFolder(tmp_path), trains_here=True)
    assert isinstance(source, ManagedVllm)
    line, need = source.process_settings.arguments(tmp_path / "socket"), source.process_settings.need
    assert need is not None
    assert line[line.index("--max-lora-rank") + 1] == str(served)
    places = ModelMemory.read(
        bases[0].path, dtype="float32", max_rank=served, adapters=settings.vllm_max_loras, head=need.model.head > 0
    )
    assert need.model.adapters == places.adapters
