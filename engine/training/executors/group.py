"""A trainer whose base is sharded over a torch.distributed group: rank 0 trains, the others help it compute.

Rank 0 holds every adapter, gradient and moment and runs an ordinary ``Trainer``; the group is the trainer's executor of
micro-batches. A pass's micro-batches are dealt to the ranks, with the weights and sequences that each needs; what they give
comes back and is noted in order, as from threads. Other ranks ``follow`` until rank 0 closes the group.

A micro-batch that breaks on one rank breaks alone (``sharding``). A rank that is gone, or a message that stays away for
longer than the timeout, is the end of the whole group: ``GroupLost`` on every rank that is left.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from contracts.base_model import BaseModelFacts
from engine.model.base import BaseModel, read_model
from engine.training.executors.group_work import Beat, Message, SentAttempt, Stop, Work
from engine.training.executors.sharding import ShardedLayers
from engine.training.fused_micro_batch import FusedMicroBatches, MicroBatchResult
from engine.training.micro_batch import PackedRow, split_for

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 600.0
"""Longest silence of a rank; loading the base must not differ by more between ranks."""
_BEATS_A_TIMEOUT = 5


class GroupLost(BaseException):
    """The ranks can no longer work together: the process must end, and all be started again.

    No ``Exception``: whoever guards an operation against failure must not take this for a failure of the operation, which
    is computed again by the next group.
    """


def is_group() -> bool:
    """Whether this process was started as one of several ranks, as ``torchrun`` does."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


class TrainerGroup:
    """This process's place in the group. On rank 0 it is the executor of a ``Trainer``; on the others ``follow``."""

    def __init__(self, device: torch.device, *, timeout_seconds: float) -> None:
        self.device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._loaded: tuple[BaseModel, ShardedLayers] | None = None
        # Messages, gloo on any device; weights, gradients and the base's gathers go through the default group.
        self._control: dist.ProcessGroup | None = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_seconds)
        )
        self._lock = Lock()
        self._in_step = True
        self._closed = Event()
        self._beats = Thread(
            target=self._beat, args=(timeout_seconds / _BEATS_A_TIMEOUT,), name="group-beat", daemon=True
        )

    @classmethod
    def join(cls, *, device: str = "auto", timeout_seconds: float = TIMEOUT_SECONDS) -> Self:
        """Meet the other ranks, as the environment (``torchrun``'s variables) says. A rank has a GPU, or shares the CPU.

        Raises ``GroupLost`` when they do not come within the timeout.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        place = torch.device(device)
        if place.type == "cuda":
            place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(place)
        with _together():
            dist.init_process_group(
                "nccl" if place.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_seconds)
            )
            return cls(place, timeout_seconds=timeout_seconds)

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that trains."""
        return self.rank == 0

    def load_base(
        self, facts: BaseModelFacts, *, dtype: str = "auto", gradient_checkpointing: bool = False
    ) -> BaseModel:
        """The group's base, on every rank at once: whole in the host's memory first, then a layer at a time to the device,
        of which the rank's share stays.

        Raises ``InvalidRequest``, on every rank, when the folder cannot be loaded or the model not be sharded.
        """
        model = read_model(facts, dtype=dtype)
        with self._lock, self._step():
            layers = ShardedLayers.shard(model, init_device_mesh(self.device.type, (self.size,)))
            base = BaseModel(facts, model.to(self.device), gradient_checkpointing=gradient_checkpointing)
            layers.check(base)
        self._loaded = base, layers
        if self.leads:
            self._beats.start()
        return base

    # --- rank 0 ----------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """All ranks work at one pass."""
        return 1

    def split(self, rows: Sequence[PackedRow], *, token_budget: int, slots: int) -> list[list[PackedRow]]:  # noqa: ARG002
        """Micro-batches for all ranks at once: see ``split_for``."""
        return split_for(rows, at_once=self.size, token_budget=token_budget)

    def compute(
        self,
        micro_batches: FusedMicroBatches,
        batches: Sequence[list[PackedRow]],
        *,
        backward: bool,
        slots: int,  # noqa: ARG002
    ) -> list[MicroBatchResult]:
        """What came of each of ``batches``, in their order. Raises ``GroupLost``."""
        if not batches:
            return []
        dealt = [list(batches[rank :: self.size]) for rank in range(self.size)]
        works = [Work.of(micro_batches.members, mine, rounds=len(dealt[0]), backward=backward) for mine in dealt]
        with self._lock, self._step():
            self._tell(works)
            for rank, work in enumerate(works[1:], start=1):
                for number in work.members:
                    dist.send(micro_batches.members[number].weights.vector, dst=rank)
            found = [self._compute(micro_batches, works[0])]
            sent: list[list[SentAttempt]] = [[] for _ in range(self.size)]
            dist.gather_object([], sent, group=self._control)
            sizes = {number: member.size for work in works for number, member in work.members.items()}
            found += [self._received(sent[rank], rank, sizes) for rank in range(1, self.size)]
        return [found[number % self.size][number // self.size] for number in range(len(batches))]

    def close(self) -> None:
        """On rank 0, the last call: the other ranks' ``follow`` returns. Does nothing once the group is lost."""
        self._closed.set()
        if self._beats.ident is not None:
            self._beats.join()
        if not self._in_step or self._loaded is None:
            return
        with self._lock, self._step():
            self._tell([Stop()] * self.size)
        self._part()

    def _received(self, sent: Sequence[SentAttempt], rank: int, sizes: dict[int, int]) -> list[MicroBatchResult]:
        attempts = []
        for one in sent:
            gradients = {}
            for number in one.members:
                gradients[number] = torch.empty(sizes[number], device=self.device)
                dist.recv(gradients[number], src=rank)
            attempts.append(one.with_gradients(gradients))
        return attempts

    def _tell(self, messages: Sequence[Message]) -> None:
        """One message to every rank, in their order."""
        dist.scatter_object_list([None], list(messages), src=0, group=self._control)

    def _beat(self, seconds: float) -> None:
        """Others may then tell an idle rank 0 from one that is gone."""
        while not self._closed.wait(seconds):
            with self._lock:
                if not self._in_step:
                    return
                try:
                    self._tell([Beat()] * self.size)
                except RuntimeError:
                    log.exception("a rank of the group is gone")
                    self._in_step = False

    # --- other ranks -----------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Compute what rank 0 sends, until it closes the group. Raises ``GroupLost`` when it is gone."""
        while True:
            with self._step():
                message = self._hear()
                if isinstance(message, Work):
                    self._help(message)
            if isinstance(message, Stop):
                break
        self._part()

    def _hear(self) -> Message:
        heard: list[Message] = [Beat()]
        dist.scatter_object_list(heard, src=0, group=self._control)
        return heard[0]

    def _help(self, work: Work) -> None:
        base, _ = self._base()
        vectors: dict[int, Tensor] = {}
        for number, member in work.members.items():
            vectors[number] = torch.empty(member.size, device=self.device)
            dist.recv(vectors[number], src=0)
        members = {number: member.member(base, vectors[number]) for number, member in work.members.items()}
        attempts = self._compute(FusedMicroBatches(base, members), work)
        sent = [SentAttempt.of(attempt) for attempt in attempts]
        dist.gather_object(sent, group=self._control)
        for one, attempt in zip(sent, attempts, strict=True):
            for number in one.members:
                if attempt.computed is not None:
                    dist.send(attempt.computed.gradients[number], dst=0)

    # --- every rank ------------------------------------------------------------------------------------------------

    def _compute(self, micro_batches: FusedMicroBatches, work: Work) -> list[MicroBatchResult]:
        """This rank's micro-batches, a round each, beside the other ranks'."""
        _, layers = self._base()
        attempts = []
        for number in range(work.rounds):
            if number < len(work.batches):
                attempts.append(micro_batches.attempt(work.batches[number], backward=work.backward))
            layers.settle(backward=work.backward)
        return attempts

    def _part(self) -> None:
        """Leave once every rank has heard that it is over: a connection that closes before would look like a loss."""
        # Whoever comes first closes its connections while the other still looks at its own.
        with suppress(RuntimeError):
            dist.gather_object(None, [None] * self.size if self.leads else None, group=self._control)
        # With its last reference gone gloo's threads of that group are joined. One that still let go of a tensor while the
        # interpreter ends would abort the process.
        dist.destroy_process_group(self._control)
        self._control = None
        dist.destroy_process_group()

    def _base(self) -> tuple[BaseModel, ShardedLayers]:
        if self._loaded is None:
            raise ValueError("load the group's base first")
        return self._loaded

    @contextmanager
    def _step(self) -> Iterator[None]:
        """What all ranks do together: whatever leaves it half done leaves them at different places, for good."""
        if not self._in_step:
            raise GroupLost("the ranks of the group have lost each other")
        self._in_step = False
        with _together():
            yield
        self._in_step = True


@contextmanager
def _together() -> Iterator[None]:
    """torch.distributed says with a ``RuntimeError`` of any kind that a rank is gone, or silent for too long."""
    try:
        yield
    except RuntimeError as error:
        raise GroupLost(str(error)) from error
