"""A process that computes micro-batches with a base of its own: ``python -m engine.training.executors.micro_batch_process``.

Threads of one process share the interpreter's lock, and a small base's operations are so short that they wait for it. Work
and results go through a pipe, weights and gradients through memory that both processes map. The process ends with the
pipe, and so with its parent.
"""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import cast

import torch
from torch import Tensor

from contracts.base_model import BaseModelFacts
from engine.model.base import BaseModel
from engine.training.executors.group_work import SentAttempt, Work
from engine.training.fused_micro_batch import FusedMicroBatches, MicroBatchResult
from engine.training.micro_batch import PackedRow

_FLOAT_BYTES = 4
_ALIGNED_FLOATS = 16
"""Vectors begin where a tensor of their own would, at 64 bytes: elsewhere products may round differently."""
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class BaseOrder:
    """The base to load."""

    facts: BaseModelFacts
    dtype: str
    gradient_checkpointing: bool


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """Micro-batches to compute on so many ``threads``; the shared memory holds ``floats`` values."""

    work: Work
    threads: int
    floats: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The base is loaded."""


class _SharedFloats:
    """Float32 values in memory that another process maps too; it only grows."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._values: Tensor | None = None

    def of(self, floats: int) -> Tensor:
        """The first ``floats`` values."""
        if self._values is None or self._values.numel() < floats:
            size = os.fstat(self.file).st_size
            if size < floats * _FLOAT_BYTES:
                size = floats * _FLOAT_BYTES
                os.ftruncate(self.file, size)
            self._values = torch.frombuffer(mmap.mmap(self.file, size), dtype=torch.float32)
        return self._values[:floats]


class MicroBatchProcess:
    """The parent's side of one process. For one thread at a time."""

    def __init__(self, order: BaseOrder) -> None:
        """Starts it; ``wait_ready`` before the first ``send``."""
        self._connection, theirs = Pipe()
        self._shared = _SharedFloats(os.memfd_create("weft-micro-batches"))
        self._sizes: dict[int, int] = {}
        self._weights = 0
        command = [sys.executable, "-m", "engine.training.executors.micro_batch_process"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(self._shared.file)],
                pass_fds=(theirs.fileno(), self._shared.file),
                stdin=subprocess.DEVNULL,
            )
        self._connection.send(order)

    def wait_ready(self) -> bool:
        """False when it has ended instead."""
        try:
            self._connection.recv()
        except (OSError, EOFError):
            return False
        return True

    def send(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[PackedRow]], *, backward: bool, threads: int
    ) -> None:
        """Have ``batches`` computed. Raises ``OSError`` when the process is gone."""
        work = Work.of(micro_batches.members, list(batches), rounds=len(batches), backward=backward)
        self._sizes = {number: member.size for number, member in work.members.items()}
        self._weights = sum(map(_room, self._sizes.values()))
        floats = self._weights + _gradient_floats(work.batches, self._sizes)
        values, at = self._shared.of(floats), 0
        for number, size in self._sizes.items():
            values[at : at + size].copy_(micro_batches.members[number].weights.vector)
            at += _room(size)
        self._connection.send(WorkOrder(work, threads, floats))

    def receive(self) -> list[MicroBatchResult]:
        """What came of what was sent last. Raises ``OSError`` or ``EOFError`` when the process is gone."""
        found = cast(list[SentAttempt], self._connection.recv())
        attempts, at = [], self._weights
        for sent in found:
            gradients: dict[int, Tensor] = {}
            for number in sent.members:
                end = at + self._sizes[number]
                # A copy: the memory is the next pass's.
                gradients[number] = self._shared.of(end)[at:].clone()
                at += _room(self._sizes[number])
            attempts.append(sent.with_gradients(gradients))
        return attempts

    def close(self) -> None:
        """End it."""
        self._connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._shared.file)


def _room(floats: int) -> int:
    return -(-floats // _ALIGNED_FLOATS) * _ALIGNED_FLOATS


def _gradient_floats(batches: Sequence[Sequence[PackedRow]], sizes: Mapping[int, int]) -> int:
    return sum(_room(sizes[number]) for batch in batches for number in {row.member for row in batch})


def _compute(base: BaseModel, order: WorkOrder, values: Tensor) -> list[SentAttempt]:
    torch.set_num_threads(order.threads)
    members, at = {}, 0
    for number, sent in order.work.members.items():
        members[number] = sent.member(base, values[at : at + sent.size])
        at += _room(sent.size)
    micro_batches, found = FusedMicroBatches(base, members), []
    for batch in order.work.batches:
        attempt = micro_batches.attempt(batch, backward=order.work.backward)
        found.append(SentAttempt.of(attempt))
        for number in found[-1].members:
            if attempt.computed is not None:
                size = order.work.members[number].size
                values[at : at + size].copy_(attempt.computed.gradients[number])
                at += _room(size)
    return found


def main(pipe: int, memory: int) -> None:
    """Compute until the parent closes the pipe, or ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Told to the whole process group: the parent finishes what it has in hand first.
        signal.signal(number, signal.SIG_IGN)
    connection, shared = Connection(pipe), _SharedFloats(memory)
    try:
        base_order = cast(BaseOrder, connection.recv())
        base = BaseModel.load(
            base_order.facts,
            dtype=base_order.dtype,
            device="cpu",
            gradient_checkpointing=base_order.gradient_checkpointing,
        )
        connection.send(Ready())
        while True:
            order = cast(WorkOrder, connection.recv())
            connection.send(_compute(base, order, shared.of(order.floats)))
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    # The parent unpickles what this process sends: its classes must not be ``__main__``'s.
    from engine.training.executors.micro_batch_process import main as run

    run(int(sys.argv[1]), int(sys.argv[2]))
