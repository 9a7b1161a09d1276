"""Contestants of ``bench.training``: each makes training steps on the same tenants' operations and returns its rate.

A step is one ``forward_backward`` of each tenant's operation and one AdamW step of each tenant. Contestants take turns of
a few steps; all of them run in float32 or the base's dtype, on torch's default number of threads.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bench.bases import synchronise
from bench.clients.sdk_clients import SdkClients
from bench.processes.cpu import children_cpu_seconds, cpu_seconds, idle_seconds
from bench.processes.memory import available_mib
from bench.training.peft_reference import PeftReference
from bench.workload import ALPHA, LEARNING_RATE, RANK, OperationShape, training_batch
from contracts.errors import WeftError
from contracts.ids import RunId
from contracts.operations import LoraSettings, OptimStep
from engine.training.trainer import PassItem, Trainer

Block = NDArray[np.int64]
SMALL_TOKENS = 2048
"""Most tokens of a step that is cheap enough to be made only for warming up."""
TURN_SECONDS = 0.5
"""Seconds that a turn repeats steps for, about; one step at least."""
_MOST_STEPS = 50
_SERVICE_WARM_UP_SECONDS = 8.0
_SERVICE_TURN_SECONDS = 20.0
"""Length of a service's turn. A turn begins and ends with an empty pipeline, which no running service has."""
_SERVICE_STEPS = (6, 60)
_IN_FLIGHT = 2
_PEAK_OVER_SAVED = 2.0
"""Ratio of a step's peak memory to the memory that its forward pass keeps for the backward pass, as seen on the CPU."""
_SEQUENTIAL_TURN_TOKENS = 4096
"""Most tokens of a turn that visits one tenant after another. The rate is the same for all tenants, so some suffice."""


class Contestant(Protocol):
    """Way to train the tenants' operations, which takes turns with other contestants."""

    def turn(self) -> float:
        """Make a few steps and return their rate in tokens a second."""
        ...


class _StepContestant(ABC):
    """A contestant whose steps are function calls. ``step_seconds``: seconds of a step as last measured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step_seconds = 0.0

    @abstractmethod
    def step(self) -> int:
        """Make one step and return the number of tokens computed."""

    def turn(self) -> float:
        """Steps for about ``TURN_SECONDS``; their rate in tokens a second."""
        steps = _steps_in(TURN_SECONDS, self.step_seconds, least=1, most=_MOST_STEPS)
        started = time.perf_counter()
        tokens = sum(self.step() for _ in range(steps))
        synchronise(self.device)
        elapsed = time.perf_counter() - started
        self.step_seconds = elapsed / steps
        return tokens / elapsed


class EngineContestant(_StepContestant):
    """weft's trainer called directly: one pass over all runs, then one AdamW call for all runs."""

    def __init__(self, trainer: Trainer, name: str, blocks: Sequence[Block], device: torch.device) -> None:
        super().__init__(device)
        self._trainer = trainer
        runs = [RunId(f"bench:{name}:{number}") for number in range(len(blocks))]
        for number, run in enumerate(runs):
            trainer.create(run, LoraSettings(rank=RANK, alpha=ALPHA, seed=number, train_unembed=True))
        self._items = [
            PassItem(run=run, batch=training_batch(block), backward=True)
            for run, block in zip(runs, blocks, strict=True)
        ]
        self._steps = [(run, OptimStep(LEARNING_RATE)) for run in runs]
        self._tokens = tokens_of(blocks)

    def warm_up(self) -> float:
        """Make one whole step and return the first run's summed loss before the step.

        Optimiser moments are made first (as zeros), so that this step takes as much memory as every later step.
        """
        self._optimise()
        started = time.perf_counter()
        loss = self._compute()
        self._optimise()
        self.step_seconds = time.perf_counter() - started
        return loss

    def step(self) -> int:
        """Make one step of all runs and return the number of tokens computed. Raises ``WeftError`` when an operation fails."""
        self._compute()
        self._optimise()
        return self._tokens

    def _compute(self) -> float:
        losses = []
        for outcome in self._trainer.run_pass(self._items):
            if isinstance(outcome, WeftError):
                raise outcome
            losses.append(outcome.metrics["loss:sum"])
        return losses[0]

    def _optimise(self) -> None:
        for outcome in self._trainer.optim_steps(self._steps):
            if isinstance(outcome, WeftError):
                raise outcome


class PeftContestant(_StepContestant):
    """Plain PEFT, the blocks one after another, each on its own adapter. A single block is the whole batch at once.

    ``most_tokens`` bounds the tokens of a step. The next step continues with the block after the last one.
    """

    def __init__(
        self, reference: PeftReference, blocks: Sequence[Block], device: torch.device, *, most_tokens: int | None
    ) -> None:
        super().__init__(device)
        self._reference = reference
        self._blocks = [torch.from_numpy(block) for block in blocks]
        self._next = 0
        self._most_tokens = most_tokens
        self._tokens = tokens_of(blocks)
        self.switch_free_rate = 0.0
        """Rate of the last turn in tokens a second, without the time of ``set_adapter``."""

    def warm_up(self) -> float:
        """Make a step on at most ``SMALL_TOKENS`` of the first block, and return their summed loss before the step."""
        block = self._blocks[0]
        rows = max(1, min(len(block), SMALL_TOKENS // (block.shape[1] - 1)))
        started = time.perf_counter()
        loss = float(self._train(0, block[:rows]))
        elapsed = time.perf_counter() - started
        part_of_step = rows * (block.shape[1] - 1) / min(self._tokens, self._most_tokens or self._tokens)
        self.step_seconds = elapsed / part_of_step
        return loss

    def fits(self) -> bool:
        """Return whether a step fits into the machine's memory, judged by a ``warm_up``; on CUDA, by trying."""
        if self.device.type == "cuda":
            return self._tried()
        with self._reference.counting_saved_bytes() as saved:
            self.warm_up()
        warmed = min(self._tokens, SMALL_TOKENS)
        needed_mib = _PEAK_OVER_SAVED * sum(saved.values()) / warmed * self._tokens / 2**20
        return needed_mib < available_mib()

    def _tried(self) -> bool:
        try:
            self.step()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return False
        return True

    def turn(self) -> float:
        """Steps for about ``TURN_SECONDS``; their rate in tokens a second."""
        switched = self._reference.switch_seconds
        started = time.perf_counter()
        rate = super().turn()
        elapsed = time.perf_counter() - started
        self.switch_free_rate = rate * elapsed / (elapsed - (self._reference.switch_seconds - switched))
        return rate

    def step(self) -> int:
        """Train the next tenants, all or as many as ``most_tokens`` allows. Return the number of tokens computed."""
        tokens = 0
        for _ in self._blocks:
            block = self._blocks[self._next]
            self._train(self._next, block)
            tokens += block.shape[0] * (block.shape[1] - 1)
            self._next = (self._next + 1) % len(self._blocks)
            if self._most_tokens is not None and tokens >= self._most_tokens:
                break
        return tokens

    def _train(self, adapter: int, block: torch.Tensor) -> torch.Tensor:
        here = block.to(self.device)
        return self._reference.step(adapter, here[:, :-1], here[:, 1:])


def sequential_peft(reference: PeftReference, blocks: Sequence[Block], device: torch.device) -> PeftContestant:
    """Return a contestant that trains one tenant after another, with a bounded number of tokens in a step."""
    return PeftContestant(reference, blocks, device, most_tokens=_SEQUENTIAL_TURN_TOKENS)


class ServiceContestant:
    """A ``weft serve`` process and tenants on the real SDK in another, each with two steps in flight.

    The counted seconds are sums over all turns: elapsed time, and CPU time of the clients, of the service's own process,
    of the service's children, and of idle cores.
    """

    def __init__(self, clients: SdkClients, shape: OperationShape, vocabulary: int, pid: int) -> None:
        """Take ``pid`` as the service's process id."""
        self._clients = clients
        self._shape = shape
        self._vocabulary = vocabulary
        self._pid = pid
        self.step_seconds = 0.0
        self.wall_s = 0.0
        self.client_cpu_s = self.own_cpu_s = self.children_cpu_s = self.idle_s = 0.0

    def warm_up(self) -> None:
        """Train until the service's rate is steady."""
        self._clients.start_run(
            self._shape, vocabulary=self._vocabulary, in_flight=_IN_FLIGHT, seconds=_SERVICE_WARM_UP_SECONDS
        )
        report = self._clients.finish_run()
        self.step_seconds = report.wall_s / max(1, min(map(len, report.steps)))

    def turn(self) -> float:
        """Make steps for about six seconds, six at least. Return their rate in tokens a second, first and last step included."""
        least, most = _SERVICE_STEPS
        steps = _steps_in(_SERVICE_TURN_SECONDS, self.step_seconds, least=least, most=most)
        before = self._seconds()
        self._clients.start_run(self._shape, vocabulary=self._vocabulary, in_flight=_IN_FLIGHT, steps=steps)
        report = self._clients.finish_run()
        own, children, idle = (after - at for after, at in zip(self._seconds(), before, strict=True))
        self.step_seconds = report.wall_s / steps
        self.wall_s += report.wall_s
        self.client_cpu_s += report.cpu_s
        self.own_cpu_s, self.children_cpu_s = self.own_cpu_s + own, self.children_cpu_s + children
        self.idle_s += idle
        return report.tokens_per_s

    def _seconds(self) -> tuple[float, float, float]:
        return cpu_seconds(self._pid), children_cpu_seconds(self._pid), idle_seconds()


def tokens_of(blocks: Sequence[Block]) -> int:
    """Return the number of tokens that a step over the blocks computes."""
    return sum(block.shape[0] * (block.shape[1] - 1) for block in blocks)


def _steps_in(seconds: float, step_seconds: float, *, least: int, most: int) -> int:
    return max(least, min(most, round(seconds / max(step_seconds, 1e-6))))
