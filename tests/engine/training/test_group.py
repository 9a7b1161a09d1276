"""A trainer of two ranks, real processes that talk over gloo: the numbers of one process, and an end when a rank is gone.

Tolerance: 1e-5 relative to the largest value of the tensor compared.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM, MptConfig, OPTConfig, PretrainedConfig, Qwen2Config

from engine.model.base import BaseModel
from engine.training.executors.group import TrainerGroup
from engine.training.trainer import Trainer
from tests.conftest import ROOT
from tests.engine.training.group_rank import SCENARIOS, TIMEOUT_SECONDS, TOKENS, Found, failing, other_facts, run_rank

DEADLINE_SECONDS = 120.0
"""Deadline of a group that starts, works and ends; the machine may be busy."""
TOLERANCE = 1e-5
LOSS_TOLERANCE = 5e-5
"""A loss is a sum whose terms partly cancel, so its relative error is larger than theirs."""
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.engine.training.group_rank"])
"""Ranks are forked from a process that has imported what they need: the imports take longer than all they do."""
_SIZES = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS: dict[str, PretrainedConfig] = {
    "flattened rows, no backbone call": OPTConfig(
        **_SIZES, ffn_dim=96, max_position_embeddings=128, word_embed_proj_dim=64, dropout=0.0
    ),
    "a head of its own kind": MptConfig(
        d_model=64, n_heads=4, n_layers=2, max_seq_len=128, vocab_size=300, logit_scale=0.5
    ),
    "tied embeddings": Qwen2Config(
        **_SIZES, intermediate_size=96, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True
    ),
}


@dataclass(frozen=True)
class Ranks:
    """Two ranks under way."""

    processes: list[ForkServerProcess]
    results: Path

    def wait(self, deadline_seconds: float = DEADLINE_SECONDS) -> list[int | None]:
        """Their exit statuses, by rank; None for a rank that goes on."""
        ends_at = monotonic() + deadline_seconds
        for process in self.processes:
            process.join(max(0.0, ends_at - monotonic()))
        return [process.exitcode for process in self.processes]

    def log(self, rank: int) -> str:
        """Output of the rank."""
        return (self.results / f"{rank}.log").read_text()


@contextmanager
def ranks(scenario: str, model: Path, results: Path) -> Iterator[Ranks]:
    """Two ranks; none outlives the block. Their store is ours, as ``torchrun``'s is its own: no port to guess."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    processes = []
    for rank in range(2):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        processes.append(_FORKS.Process(target=run_rank, args=(scenario, model, results, environment)))
        processes[-1].start()
    try:
        yield Ranks(processes, results)
    finally:
        for process in processes:
            process.kill()
            process.join()


def results_of(scenario: str, model: Path, results: Path) -> Found:
    """Results of a group of two ranks, both of which ended well."""
    with ranks(scenario, model, results) as group:
        assert group.wait() == [0, 0], group.log(0) + group.log(1)
        found: Found = torch.load(results / "found.pt")
        found["log of the other rank"] = group.log(1)
    return found


@pytest.fixture(scope="module")
def found(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Every scenario, one after another in one group."""
    return results_of("all", tiny_model_dir, tmp_path_factory.mktemp("group"))


def assert_alike(ours: object, theirs: object, place: str) -> None:
    """The same structure, tensors and numbers within the tolerance, all else equal."""
    assert type(ours) is type(theirs), place
    if isinstance(ours, dict) and isinstance(theirs, dict):
        assert list(ours) == list(theirs), place
        for key in ours:
            assert_alike(ours[key], theirs[key], f"{place}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list):
        assert len(ours) == len(theirs), place
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(one, other, f"{place}[{number}]")
    elif isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        scale = max(float(theirs.abs().max()), 1e-3)
        assert float((ours - theirs).abs().max()) <= TOLERANCE * scale, place
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=LOSS_TOLERANCE), place
    else:
        assert ours == theirs, place


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_two_ranks_give_the_outcomes_gradients_and_weights_of_one_process(
    found: Found, base: BaseModel, scenario: str
) -> None:
    with failing(base):
        expected = SCENARIOS[scenario](Trainer(base, pass_token_budget=TOKENS))
    assert_alike(found[scenario], expected, scenario)


def test_what_fails_on_a_rank_fails_alone(found: Found) -> None:
    """The scenarios fail as they mean to, on both ranks, and their neighbours do not."""
    assert "unlucky" in str(found["log of the other rank"])
    failures = {
        (scenario, name): [outcome.get("error") for outcome in one["outcomes"]]
        for scenario in ("unsound", "broken", "unlucky")
        for name, one in found[scenario].items()  # type: ignore[attr-defined]
    }
    assert failures == {
        ("unsound", "beside"): ["invalid_request", None],
        ("unsound", "alone"): ["invalid_request"],
        ("unsound", "after"): [None],
        ("broken", "beside"): ["engine_failure", None],
        ("unlucky", "forward"): ["out_of_memory", None],
        ("unlucky", "backward"): ["out_of_memory", None],
        ("unlucky", "after"): [None],
    }


def test_a_rank_holds_half_of_every_layer(found: Found) -> None:
    shards = found["shards"]
    assert isinstance(shards, dict)
    assert shards["local"] * 2 == shards["all"]


def test_layers_computed_again_in_the_backward_pass_are_gathered_for_it(
    base: BaseModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    found = results_of("checkpointed", tiny_model_dir, tmp_path)
    assert_alike(found["training"], SCENARIOS["training"](Trainer(base, pass_token_budget=TOKENS)), "training")


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_other_architectures_are_sharded_with_the_same_numbers(config: PretrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(config).float().save_pretrained(model)
    found = results_of("other", model, tmp_path)
    single = Trainer(BaseModel.load(other_facts(model)), pass_token_budget=TOKENS)
    assert_alike(found["training"], SCENARIOS["training"](single), "training")


@pytest.mark.parametrize("victim", [0, 1], ids=["rank 0", "the other rank"])
def test_a_rank_that_is_gone_ends_the_group(tiny_model_dir: Path, tmp_path: Path, victim: int) -> None:
    """Killed in the middle of passes: the rank that is left says so and ends, before the timeout."""
    with ranks("endless", tiny_model_dir, tmp_path) as group:
        wait_for_file(tmp_path / "passing", group)
        group.processes[victim].kill()
        statuses = group.wait(TIMEOUT_SECONDS)
        assert statuses[victim] == -signal.SIGKILL
        assert statuses[1 - victim] == 1
        assert "GroupLost" in group.log(1 - victim)


def test_an_idle_group_outlives_its_timeout_and_a_silent_rank_0_does_not(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Rank 0 has no work for longer than the timeout, then hangs: stopped, it holds its connections and says nothing."""
    with ranks("idle", tiny_model_dir, tmp_path) as group:
        wait_for_file(tmp_path / "passing", group)
        os.kill(group.processes[0].pid or 0, signal.SIGSTOP)
        group.processes[1].join(DEADLINE_SECONDS)
        assert group.processes[1].exitcode == 1
        assert "GroupLost" in group.log(1)


def test_torchrun_starts_a_group_and_both_ranks_end(tiny_model_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2"]
    module = ["-m", "tests.engine.training.group_rank", "training", str(tiny_model_dir), str(tmp_path)]
    ended = subprocess.run([*command, *module], cwd=ROOT, timeout=DEADLINE_SECONDS, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "found.pt").is_file()


def wait_for_file(path: Path, group: Ranks) -> None:
    """Wait until rank 0 has made ``path``; fail the test if rank 0 ends before."""
    ends_at = monotonic() + DEADLINE_SECONDS
    while not path.exists():
        group.processes[0].join(0.05)
        assert group.processes[0].is_alive(), group.log(0)
        assert monotonic() < ends_at, group.log(0)


def test_every_thread_that_takes_a_step_uses_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has CUDA's first GPU until it chooses another, and steps are taken on whichever thread is free."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    group: Any = object.__new__(TrainerGroup)
    group.device, group._in_step = torch.device("cuda", 3), True

    def step() -> None:
        with group._step():
            pass

    for _ in range(2):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert used == [torch.device("cuda", 3)] * 2
