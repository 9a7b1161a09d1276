"""One fused pass over sequences of many operations on many adapters.

Every operation is a member of its own, so that it gets its own gradient and fails alone, even beside another of the same
adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from torch import Tensor

from contracts.errors import EngineFailure, InvalidRequest, WeftError
from contracts.pass_report import PassReport
from engine.model.base import BaseModel
from engine.model.lora import LoraWeights
from engine.training.fused_micro_batch import Clocks, Computed, FusedMicroBatches, MemberSlice, MicroBatchResult
from engine.training.micro_batch import Member, PackedRow, padded_tokens
from engine.training.pass_operation import PassPiece, PieceResult
from engine.training.target_logprobs import CHUNK_LOGITS


class MicroBatchExecutor(Protocol):
    """Where micro-batches are computed: threads of this process, or the ranks of a group."""

    @property
    def slots(self) -> int:
        """Passes of one micro-batch each that can be computed at once; a pass may have several slots for itself."""

    def split(self, rows: Sequence[PackedRow], *, token_budget: int, slots: int) -> list[list[PackedRow]]:
        """Micro-batches of ``rows`` for a pass on so many slots; with all slots at work ``token_budget`` padded tokens are
        computed at once.
        """

    def compute(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[PackedRow]], *, backward: bool, slots: int
    ) -> list[MicroBatchResult]:
        """What came of each of ``batches``, in their order."""


@dataclass(frozen=True, slots=True)
class ComputedPass:
    """What came of each piece of a pass. Nothing has heard of it yet."""

    pieces: list[PassPiece]
    results: list[PieceResult]
    report: PassReport


@dataclass(slots=True)
class _Sums:
    """What a member's sequences of this pass add up to."""

    logprobs: dict[int, np.ndarray]
    loss: float = 0.0
    gradient: Tensor | None = None
    error: WeftError | None = None


class FusedPass:
    """Computes the pieces, no two of one operation. Their batches have passed ``check_batch``.

    ``weights[i]`` is the adapter of ``pieces[i]``. Micro-batches are computed beside each other and noted in order, so sums
    do not depend on which ends first.
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
    ) -> None:
        self._executor = executor
        self._slots = slots
        self._pieces = list(pieces)
        members = [
            Member(piece.operation.batch.loss, piece.operation.batch.data, adapter)
            for piece, adapter in zip(pieces, weights, strict=True)
        ]
        self._micro_batches = FusedMicroBatches(base, members)
        # A head of its own kind gives all logits at once: fewer tokens go together then.
        whole_logits = max(1, CHUNK_LOGITS // base.facts.vocabulary_size)
        self._token_budget = token_budget if base.has_plain_head else min(token_budget, whole_logits)
        self._sums = [_Sums(logprobs={}) for _ in pieces]
        self._clocks: list[Clocks] = []
        self._padded = 0

    def run(self) -> ComputedPass:
        """Compute all pieces. Blocking; for any thread."""
        started = perf_counter()
        tokens = sequences = 0
        for backward in (True, False):
            rows = [row for row in self._rows() if self._pieces[row.member].operation.backward is backward]
            tokens, sequences = tokens + sum(row.length for row in rows), sequences + len(rows)
            batches = self._executor.split(rows, token_budget=self._token_budget, slots=self._slots)
            attempts = self._compute(batches, backward=backward)
            for batch, attempt in zip(batches, attempts, strict=True):
                self._take(batch, attempt, backward=backward)
        results = [_result(piece, sums) for piece, sums in zip(self._pieces, self._sums, strict=True)]
        seconds = perf_counter() - started
        # The clocks of micro-batches that run at once add up to more than the time that passes.
        share = seconds / (sum(clocks.all.seconds for clocks in self._clocks) or 1.0)
        report = PassReport(
            adapters=len({piece.operation.run for piece in self._pieces}),
            sequences=sequences,
            tokens=tokens,
            padded_tokens=self._padded,
            seconds=seconds,
            low_rank_seconds=share * sum(clocks.low_rank.seconds for clocks in self._clocks),
            loss_seconds=share * sum(clocks.loss.seconds for clocks in self._clocks),
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

    def _take(self, rows: list[PackedRow], attempt: MicroBatchResult, *, backward: bool) -> None:
        """Note what a micro-batch gave; where it broke, compute each member again by itself."""
        self._clocks.append(attempt.clocks)
        if attempt.computed is not None:
            self._note(attempt.computed)
            return
        members = sorted({row.member for row in rows if self._sums[row.member].error is None})
        if len({row.member for row in rows}) == 1:
            for member in members:
                self._sums[member].error = EngineFailure(
                    "weft could not compute this pass, possibly for lack of memory; try fewer or shorter sequences"
                )
            return
        # One after another: what the failed attempt held is free again, and they must not need it at once.
        for member in members:
            alone = [row for row in rows if row.member == member]
            (again,) = self._compute([alone], backward=backward)
            self._take(alone, again, backward=backward)

    def _note(self, computed: Computed) -> None:
        """Add a micro-batch to its members' sums; those that have failed stay so."""
        self._padded += padded_tokens([row for share in computed.shares for row in share.rows])
        for share, loss, is_sound in zip(computed.shares, computed.losses, computed.is_sound, strict=True):
            sums = self._sums[share.member]
            if sums.error is not None:
                continue
            if is_sound:
                self._add(share, loss, computed.logprobs[share.targets], computed.gradients.get(share.member))
            else:
                sums.error = InvalidRequest("the loss is not finite: lower the weights, advantages or learning rate")

    def _add(self, share: MemberSlice, loss: float, values: np.ndarray, gradient: Tensor | None) -> None:
        sums, at = self._sums[share.member], 0
        for row in share.rows:
            targets = self._pieces[row.member].operation.batch.data[row.datum].targets
            sums.logprobs[row.datum] = values[at : at + targets.size].reshape(targets.shape).copy()
            at += targets.size
        sums.loss += loss
        sums.gradient = gradient if sums.gradient is None or gradient is None else sums.gradient + gradient


def _result(piece: PassPiece, sums: _Sums) -> PieceResult:
    if sums.error is not None:
        return PieceResult(piece.sequences, error=sums.error)
    numbers = range(piece.first, piece.first + piece.sequences)
    logprobs = [sums.logprobs[number] for number in numbers if number in sums.logprobs]
    return PieceResult(piece.sequences, sums.loss, logprobs, sums.gradient)
