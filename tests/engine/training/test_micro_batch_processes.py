"""Micro-batches in processes of their own: the numbers of threads, to the bit, and nothing that outlives its parent."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread

import psutil
import pytest
import torch

from contracts.operations import ForwardBackwardOutput, LossName
from engine.model.base import BaseModel
from engine.training.executors.micro_batch_process import BaseOrder
from engine.training.executors.micro_batch_processes import MicroBatchProcesses
from engine.training.pass_operation import PassOperation
from engine.training.trainer import Trainer
from tests.conftest import ROOT
from tests.engine.training.conftest import NEIGHBOUR, RUN, make_batch, randomise, settings

DEADLINE = 60.0
LENGTHS = (70, 40, 90, 64, 33, 80, 51, 95)
LOSSES = {RUN: LossName.PPO, NEIGHBOUR: LossName.CROSS_ENTROPY}


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A pass on one slot leaves its thread, here the test's, with one core."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def processes(base: BaseModel) -> Iterator[MicroBatchProcesses]:
    """Started by the first passes that stand beside each other."""
    found = MicroBatchProcesses(base, BaseOrder(base.facts, "auto", gradient_checkpointing=False), busy_passes=1)
    if found.slots < 2:
        pytest.skip("one core computes one micro-batch at a time")
    trainer = trainer_of(base, found)
    assert not found.has_processes
    with beside_each_other(trainer):
        found.wait_started(DEADLINE)
    yield found
    found.close()


def trainer_of(base: BaseModel, executor: MicroBatchProcesses | None) -> Trainer:
    """Two tenants' adapters of different ranks."""
    trainer = Trainer(base, pass_token_budget=512, executor=executor)
    for number, run in enumerate((RUN, NEIGHBOUR)):
        trainer.create(run, settings(rank=3 + 5 * number))
        randomise(trainer, run, number)
    return trainer


@contextmanager
def beside_each_other(trainer: Trainer) -> Iterator[None]:
    """Two passes at once."""
    together = Barrier(2)

    def compute() -> None:
        together.wait(DEADLINE)
        for _ in range(20):
            pass_of(trainer, slots=1)

    threads = [Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(DEADLINE)


def pass_of(trainer: Trainer, *, slots: int) -> list[PassOperation]:
    """Both tenants' operations, computed and finished."""
    operations = [PassOperation(run, make_batch(1, loss, LENGTHS), True) for run, loss in LOSSES.items()]
    computed = trainer.compute([one.next_piece(len(LENGTHS)) for one in operations], slots=slots)
    for piece, result in zip(computed.pieces, computed.results, strict=True):
        piece.operation.note(piece, result)
    return operations


def assert_same(ours: list[PassOperation], theirs: list[PassOperation]) -> None:
    """To the bit."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.gradient is not None
        assert other.gradient is not None
        assert mine.gradient.equal(other.gradient)
        assert mine.loss == other.loss
        assert all((a == b).all() for a, b in zip(mine.logprobs, other.logprobs, strict=True))


@pytest.mark.parametrize("slots", [1, 2])
def test_processes_give_the_numbers_of_threads(base: BaseModel, processes: MicroBatchProcesses, slots: int) -> None:
    assert_same(
        pass_of(trainer_of(base, processes), slots=slots),
        pass_of(trainer_of(base, None), slots=slots),
    )


def test_a_process_that_is_killed_fails_no_operation(base: BaseModel, processes: MicroBatchProcesses) -> None:
    """Not of the tenant whose micro-batch it had, nor of the other one; another process takes its place."""
    expected = pass_of(trainer_of(base, None), slots=2)
    before = computing()
    for child in before:
        child.send_signal(signal.SIGKILL)
        child.wait(DEADLINE)
    found = pass_of(trainer_of(base, processes), slots=2)
    assert all(isinstance(one.output(), ForwardBackwardOutput) for one in found)
    assert_same(found, expected)
    assert len(computing()) == processes.slots
    assert not before & computing()


def test_where_no_process_can_be_started_threads_compute_until_one_can(
    base: BaseModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """A base that cannot be read again for a while: no operation of either tenant fails, and no slot is lost."""
    folder, away = tmp_path / "tiny", tmp_path / "away"
    shutil.copytree(tiny_model_dir, folder)
    facts, others = replace(base.facts, path=folder), computing()
    found = MicroBatchProcesses(base, BaseOrder(facts, "auto", gradient_checkpointing=False), busy_passes=1)
    try:
        trainer, expected = trainer_of(base, found), pass_of(trainer_of(base, None), slots=2)
        with beside_each_other(trainer):
            assert found.wait_started(DEADLINE)
        folder.rename(away)
        for child in computing() - others:
            child.kill()
            child.wait(DEADLINE)
        assert_same(pass_of(trainer_of(base, found), slots=2), expected)
        away.rename(folder)
        assert_same(pass_of(trainer_of(base, found), slots=2), expected)
        assert len(computing() - others) == found.slots
    finally:
        found.close()


def computing() -> set[psutil.Process]:
    """This process's children that compute micro-batches."""
    return {
        child
        for child in psutil.Process().children()
        if "engine.training.executors.micro_batch_process" in child.cmdline()
    }


def test_a_process_ends_with_its_parent(tiny_model_dir: Path) -> None:
    """However that ends."""
    script = (
        "from pathlib import Path; from contracts.base_model import read_base_model_facts\n"
        "from engine.training.executors.micro_batch_process import BaseOrder, MicroBatchProcess\n"
        f"facts = read_base_model_facts('weft/tiny', Path({str(tiny_model_dir)!r}), None)\n"
        "process = MicroBatchProcess(BaseOrder(facts, 'auto', gradient_checkpointing=False))\n"
        "process.wait_ready(); print('ready', flush=True); input()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait(DEADLINE)
        assert child.wait(DEADLINE) is not None or not child.is_running()
