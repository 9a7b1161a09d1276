"""One fused pass: computes sequences of many training operations, on many adapters, in shared calls of one base model.

Every operation is a member of its own, even beside another operation of the same adapter. So it gets its own gradient and
fails alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from torch import Tensor

from contracts.errors import EngineFailure, InvalidRequest, OutOfMemory, WeftError
from contracts.pass_report import PassReport
from engine.model.base import BaseModel
from engine.model.lora import LoraWeights
from engine.training.fused_micro_batch import (
    Clocks,
    FusedMicroBatches,
    MemberSlice,
    MicroBatchOutput,
    MicroBatchResult,
)
from engine.training.micro_batch import Member, PackedRow, padded_tokens
from engine.training.micro_batch_memory import MicroBatchMemory
from engine.training.pass_operation import PassPiece, PieceResult
from engine.training.target_logprobs import CHUNK_LOGITS


class MicroBatchExecutor(Protocol):
    """Computes micro-batches: on threads of this process, or on the ranks of a group."""

    @property
    def slots(self) -> int:
        """Number of one-slot passes that can be computed at once. One pass may take several slots."""

    def split(self, rows: Sequence[PackedRow], *, token_budget: int, slots: int) -> list[list[PackedRow]]:
        """Cut ``rows`` into micro-batches for a pass on ``slots`` slots.

        ``token_budget``: padded tokens that all slots together compute at once.
        """

    def compute(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[PackedRow]], *, backward: bool, slots: int
    ) -> list[MicroBatchResult]:
        """Compute ``batches`` on ``slots`` slots and return their results in order."""


@dataclass(frozen=True, slots=True)
class ComputedPass:
    """Results of a pass by piece, ``results[i]`` of ``pieces[i]``, not noted in any operation yet."""

    pieces: list[PassPiece]
    results: list[PieceResult]
    report: PassReport


@dataclass(slots=True)
class _Sums:
    """Running sums over a member's sequences in this pass; ``logprobs`` by sequence number."""

    logprobs: dict[int, np.ndarray]
    loss: float = 0.0
    gradient: Tensor | None = None
    error: WeftError | None = None


class FusedPass:
    """Computes pieces of operations, at most one of each operation. Their batches have passed ``check_batch``.

    ``weights[i]`` is the adapter of ``pieces[i]``. Micro-batches are computed at the same time and noted in order, so the sums
    do not depend on which micro-batch ends first.
    """

    def __init__(
        self,
        base: BaseModel,
        pieces: Sequence[PassPiece],
        weights: Sequence[LoraWeights],
        *,
        token_budget: int,
        executor: MicroBatchExecutor,
        slots: int,
        memory: MicroBatchMemory,
    ) -> None:
        self._executor = executor
        self._memory = memory
        self._slots = slots
        self._pieces = list(pieces)
        members = [
            Member(piece.operation.batch.loss, piece.operation.batch.data, adapter)
            for piece, adapter in zip(pieces, weights, strict=True)
        ]
        self._micro_batches = FusedMicroBatches(base, members)
        # Without a plain head the model returns whole logits: a micro-batch must be as small as a chunk of them.
        whole_logits = max(1, CHUNK_LOGITS // base.facts.vocabulary_size)
        self._token_budget = token_budget if base.has_plain_head else min(token_budget, whole_logits)
        self._sums = [_Sums(logprobs={}) for _ in pieces]
        self._clocks: list[Clocks] = []
        self._padded = 0

    def run(self) -> ComputedPass:
        """Compute all pieces. Blocks; for any thread."""
        started = perf_counter()
        tokens = sequences = 0
        for backward in (True, False):
            rows = [row for row in self._rows() if self._pieces[row.member].operation.runs_backward is backward]
            tokens, sequences = tokens + sum(row.length for row in rows), sequences + len(rows)
            batches = self._memory.cut(self._executor.split(rows, token_budget=self._token_budget, slots=self._slots))
            found = self._compute(batches, backward=backward)
            for batch, result in zip(batches, found, strict=True):
                self._note_result(batch, result, backward=backward)
        results = [_result(piece, sums) for piece, sums in zip(self._pieces, self._sums, strict=True)]
        seconds = perf_counter() - started
        # The clocks of micro-batches computed at the same time add up to more than the pass's seconds.
        scale = seconds / (sum(clocks.all.seconds for clocks in self._clocks) or 1.0)
        report = PassReport(
            adapters=len({piece.operation.run for piece in self._pieces}),
            sequences=sequences,
            tokens=tokens,
            padded_tokens=self._padded,
            seconds=seconds,
            low_rank_seconds=scale * sum(clocks.low_rank.seconds for clocks in self._clocks),
            loss_seconds=scale * sum(clocks.loss.seconds for clocks in self._clocks),
        )
        return ComputedPass(self._pieces, results, report)

    def _compute(self, batches: Sequence[list[PackedRow]], *, backward: bool) -> list[MicroBatchResult]:
        return self._executor.compute(self._micro_batches, batches, backward=backward, slots=self._slots)

    def _rows(self) -> list[PackedRow]:
        return [
            PackedRow(member, number, len(piece.operation.batch.data[number].tokens))
            for member, piece in enumerate(self._pieces)
            for number in range(piece.first, piece.first + piece.sequences)
        ]

    def _note_result(self, rows: list[PackedRow], result: MicroBatchResult, *, backward: bool) -> None:
        """Note a micro-batch's result. If the micro-batch failed, compute its parts again, each by itself.

        The parts are its members, of which one may break it, or its halves where the device lacks memory.
        """
        self._clocks.append(result.clocks)
        if result.output is not None:
            self._note_output(result.output)
            return
        members = list(dict.fromkeys(row.member for row in rows))
        if result.lacks_memory and len(rows) > 1:
            parts = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        elif len(members) > 1:
            parts = [[row for row in rows if row.member == member] for member in members]
        else:
            self._sums[members[0]].error = self._sums[members[0]].error or _failure(lacks_memory=result.lacks_memory)
            return
        # One after another: at the same time, the parts could need as much memory as the micro-batch that failed.
        fitted = []
        for part in parts:
            if left := [row for row in part if self._sums[row.member].error is None]:
                (again,) = self._compute([left], backward=backward)
                fitted += [] if again.output is None else [left]
                self._note_result(left, again, backward=backward)
        if result.lacks_memory and fitted == parts:
            self._memory.learn(max(fitted, key=padded_tokens))

    def _note_output(self, output: MicroBatchOutput) -> None:
        """Add a micro-batch to its members' sums. A member that has failed stays failed."""
        self._padded += padded_tokens([row for part in output.slices for row in part.rows])
        for part, loss, is_sound in zip(output.slices, output.losses, output.is_sound, strict=True):
            sums = self._sums[part.member]
            if sums.error is not None:
                continue
            if is_sound:
                self._add(part, loss, output.logprobs[part.targets], output.gradients.get(part.member))
            else:
                sums.error = InvalidRequest("the loss is not finite: lower the weights, advantages or learning rate")

    def _add(self, part: MemberSlice, loss: float, values: np.ndarray, gradient: Tensor | None) -> None:
        sums, at = self._sums[part.member], 0
        for row in part.rows:
            targets = self._pieces[row.member].operation.batch.data[row.datum].targets
            sums.logprobs[row.datum] = values[at : at + targets.size].reshape(targets.shape).copy()
            at += targets.size
        sums.loss += loss
        sums.gradient = gradient if sums.gradient is None or gradient is None else sums.gradient + gradient


def _failure(*, lacks_memory: bool) -> EngineFailure:
    if lacks_memory:
        return OutOfMemory(
            "the device has no memory for one of these sequences now; nothing was changed: send the request again, or "
            "shorter sequences"
        )
    return EngineFailure("weft could not compute this pass; nothing was changed: send the request again, or other data")


def _result(piece: PassPiece, sums: _Sums) -> PieceResult:
    if sums.error is not None:
        return PieceResult(piece.sequences, error=sums.error)
    numbers = range(piece.first, piece.first + piece.sequences)
    logprobs = [sums.logprobs[number] for number in numbers if number in sums.logprobs]
    return PieceResult(piece.sequences, sums.loss, logprobs, sums.gradient)
