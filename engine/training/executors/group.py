"""A trainer whose base is sharded over a torch.distributed group: rank 0 trains, the other ranks help it compute.

Rank 0 holds every adapter, gradient and moment and runs an ordinary ``Trainer``. The group is that trainer's executor of
micro-batches:

- Rank 0 deals a pass's micro-batches to the ranks, with the weights and sequences that each rank needs.
- Every rank computes its micro-batches. Rank 0 collects the results and notes them in order, as it does with threads.
- The other ranks ``follow`` until rank 0 closes the group.

An error in a micro-batch of one rank fails that micro-batch only (``sharding``). A rank that is gone, or silent for longer
than the timeout, ends the whole group: every rank that is left raises ``GroupLost``.
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
from contracts.errors import ProcessMustEnd
from engine.model.base import BaseModel, read_model
from engine.model.device_choice import choose_device
from engine.training.executors.group_messages import Heartbeat, Message, SentResult, Stop, Work
from engine.training.executors.sharding import ShardedLayers
from engine.training.fused_micro_batch import FusedMicroBatches, MicroBatchResult
from engine.training.micro_batch import PackedRow, split_for

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 600.0
"""Longest silence of a rank. The ranks' times to load the base must not differ by more."""
_HEARTBEATS_A_TIMEOUT = 5


class GroupLost(ProcessMustEnd):
    """Error of a group whose ranks can no longer work together: every process of the group must end and be started again.

    No operation has failed: the next group computes it again.
    """


def is_group() -> bool:
    """Tell whether this process was started as one of several ranks, as ``torchrun`` does."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


class TrainerGroup:
    """One rank's membership in the group. Rank 0 uses it as the executor of a ``Trainer``; other ranks call ``follow``."""

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
        self._heartbeats = Thread(
            target=self._send_heartbeats,
            args=(timeout_seconds / _HEARTBEATS_A_TIMEOUT,),
            name="group-heartbeat",
            daemon=True,
        )

    @classmethod
    def join(cls, *, device: str = "auto", timeout_seconds: float = TIMEOUT_SECONDS) -> Self:
        """Meet the other ranks named by the environment (``torchrun``'s variables).

        ``device`` auto: a GPU for each rank if there is CUDA, else the CPU for all. Raises ``GroupLost`` when the other
        ranks do not come within the timeout.
        """
        if device == "auto":
            device = choose_device()
        place = torch.device(device)
        if place.type == "cuda":
            place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            _use(place)
        _keep_to_loopback()
        with _raising_group_lost():
            dist.init_process_group(
                "nccl" if place.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_seconds)
            )
            return cls(place, timeout_seconds=timeout_seconds)

    @property
    def leads(self) -> bool:
        """True on the rank that trains, rank 0."""
        return self.rank == 0

    def load_base(
        self, facts: BaseModelFacts, *, dtype: str = "auto", gradient_checkpointing: bool | None = None
    ) -> BaseModel:
        """Load the group's base, on every rank at once, and return this rank's part of it.

        Each rank reads the whole model into the host's memory first. Then one layer at a time goes to the device, where the
        rank's shard of it stays. Raises ``InvalidRequest``, on every rank, when the folder cannot be loaded or the model
        cannot be sharded.
        """
        model = read_model(facts, dtype=dtype)
        with self._lock, self._step():
            layers = ShardedLayers.shard(model, init_device_mesh(self.device.type, (self.size,)))
            base = BaseModel(facts, model.to(self.device), gradient_checkpointing=gradient_checkpointing)
            layers.check(base)
        self._loaded = base, layers
        if self.leads:
            self._heartbeats.start()
        return base

    # --- rank 0 ----------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """One slot: all ranks work at one pass."""
        return 1

    def split(self, rows: Sequence[PackedRow], *, token_budget: int, slots: int) -> list[list[PackedRow]]:  # noqa: ARG002
        """Cut ``rows`` into micro-batches for all ranks at once (``split_for``)."""
        return split_for(rows, at_once=self.size, token_budget=token_budget)

    def compute(
        self,
        micro_batches: FusedMicroBatches,
        batches: Sequence[list[PackedRow]],
        *,
        backward: bool,
        slots: int,  # noqa: ARG002
    ) -> list[MicroBatchResult]:
        """Compute ``batches`` on all ranks and return their results in order. Raises ``GroupLost``."""
        if not batches:
            return []
        dealt = [list(batches[rank :: self.size]) for rank in range(self.size)]
        works = [Work.of(micro_batches.members, mine, rounds=len(dealt[0]), backward=backward) for mine in dealt]
        with self._lock, self._step():
            self._scatter(works)
            for rank, work in enumerate(works[1:], start=1):
                for number, member in work.members.items():
                    if member.size:
                        dist.send(micro_batches.members[number].weights.vector, dst=rank)
            found = [self._compute(micro_batches, works[0])]
            sent: list[list[SentResult]] = [[] for _ in range(self.size)]
            dist.gather_object([], sent, group=self._control)
            sizes = {number: member.size for work in works for number, member in work.members.items()}
            found += [self._receive_gradients(sent[rank], rank, sizes) for rank in range(1, self.size)]
        return [found[number % self.size][number // self.size] for number in range(len(batches))]

    def close(self) -> None:
        """End the group: the other ranks' ``follow`` returns. The last call on rank 0; does nothing in a lost group."""
        self._closed.set()
        if self._heartbeats.ident is not None:
            self._heartbeats.join()
        if not self._in_step or self._loaded is None:
            return
        with self._lock, self._step():
            self._scatter([Stop()] * self.size)
        self._leave()

    def _receive_gradients(
        self, sent: Sequence[SentResult], rank: int, sizes: dict[int, int]
    ) -> list[MicroBatchResult]:
        """Receive the gradients of a rank's results and return the results whole. ``sizes`` are elements by member."""
        results = []
        for one in sent:
            gradients = {}
            for number in one.members:
                gradients[number] = torch.empty(sizes[number], device=self.device)
                dist.recv(gradients[number], src=rank)
            results.append(one.with_gradients(gradients))
        return results

    def _scatter(self, messages: Sequence[Message]) -> None:
        """Send one message to every rank: ``messages[rank]``."""
        dist.scatter_object_list([None], list(messages), src=0, group=self._control)

    def _send_heartbeats(self, seconds: float) -> None:
        """Send a heartbeat every ``seconds``, so that the other ranks can tell an idle rank 0 from one that is gone."""
        while not self._closed.wait(seconds):
            with self._lock:
                if not self._in_step:
                    return
                try:
                    self._scatter([Heartbeat()] * self.size)
                except RuntimeError:
                    log.exception("a rank of the group is gone")
                    self._in_step = False

    # --- other ranks -----------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Compute the work that rank 0 sends, until it closes the group. Raises ``GroupLost`` when rank 0 is gone."""
        while True:
            with self._step():
                message = self._receive_message()
                if isinstance(message, Work):
                    self._compute_and_send(message)
            if isinstance(message, Stop):
                break
        self._leave()

    def _receive_message(self) -> Message:
        received: list[Message] = [Heartbeat()]
        dist.scatter_object_list(received, src=0, group=self._control)
        return received[0]

    def _compute_and_send(self, work: Work) -> None:
        base, _ = self._base()
        vectors: dict[int, Tensor] = {}
        for number, member in work.members.items():
            vectors[number] = torch.empty(member.size, device=self.device)
            if member.size:
                dist.recv(vectors[number], src=0)
        members = {number: member.member(base, vectors[number]) for number, member in work.members.items()}
        results = self._compute(FusedMicroBatches(base, members), work)
        sent = [SentResult.of(result) for result in results]
        dist.gather_object(sent, group=self._control)
        for one, result in zip(sent, results, strict=True):
            for number in one.members:
                if result.output is not None:
                    dist.send(result.output.gradients[number], dst=0)

    # --- every rank ------------------------------------------------------------------------------------------------

    def _compute(self, micro_batches: FusedMicroBatches, work: Work) -> list[MicroBatchResult]:
        """Compute this rank's micro-batches, one in each round, in step with the other ranks."""
        _, layers = self._base()
        results = []
        for number in range(work.rounds):
            if number < len(work.batches):
                results.append(micro_batches.compute(work.batches[number], backward=work.backward))
            layers.complete_gathers(backward=work.backward)
        return results

    def _leave(self) -> None:
        """Leave once every rank knows that the group ends: a connection closed earlier would look like a lost rank."""
        # Suppressed: the first rank that is done closes its connections while another rank still checks its own.
        with suppress(RuntimeError):
            dist.gather_object(None, [None] * self.size if self.leads else None, group=self._control)
        # Dropping the last reference joins the gloo threads of the control group. A gloo thread that frees a tensor while
        # the interpreter shuts down would abort the process.
        dist.destroy_process_group(self._control)
        self._control = None
        dist.destroy_process_group()

    def _base(self) -> tuple[BaseModel, ShardedLayers]:
        if self._loaded is None:
            raise ValueError("load the group's base first")
        return self._loaded

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Guard a step that all ranks take together. A step left half done loses the group: its ranks no longer match."""
        if not self._in_step:
            raise GroupLost("the ranks of the group have lost each other")
        _use(self.device)
        self._in_step = False
        with _raising_group_lost():
            yield
        self._in_step = True


@contextmanager
def _raising_group_lost() -> Iterator[None]:
    """Raise ``GroupLost`` for a ``RuntimeError``: torch.distributed's error for a rank that is gone or silent too long."""
    try:
        yield
    except RuntimeError as error:
        raise GroupLost(str(error)) from error


def _use(device: torch.device) -> None:
    """Have this thread use the rank's GPU: CUDA's device is each thread's own, and a new thread has the first one.

    Weights are sharded to the current device, and gathered on its streams.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _keep_to_loopback() -> None:
    """Have the ranks of one machine talk over loopback only, unless interfaces are set: their messages are pickles."""
    if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "::1", "localhost"):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
