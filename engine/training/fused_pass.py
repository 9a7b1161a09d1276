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

from engine.contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.training.base import BaseModel
from engine.training.fused_micro_batch import Attempt, Clocks, Computed, FusedMicroBatches, Share
from engine.training.lora import LoraWeights
from engine.training.micro_batch import Member, Row, padded_tokens
from engine.training.pass_operation import PassOperation, PassPiece, PassReport
from engine.training.target_logprobs import CHUNK_LOGITS


class MicroBatchExecutor(Protocol):
    """Where micro-batches are computed: threads of this process, or the ranks of a group."""

    def split(self, rows: Sequence[Row], *, token_budget: int) -> list[list[Row]]:
        """Micro-batches of ``rows`` such that all that are computed at once have ``token_budget`` padded tokens."""

    def compute(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[Row]], *, backward: bool
    ) -> list[Attempt]:
        """What came of each of ``batches``, in their order."""


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
    ) -> None:
        self._executor = executor
        self._operations = [piece.operation for piece in pieces]
        self._counts = [piece.sequences for piece in pieces]
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

    def run(self) -> PassReport:
        """Compute all pieces and note in each operation what came out, or the error that ended it."""
        started = perf_counter()
        tokens = sequences = 0
        for backward in (True, False):
            rows = [row for row in self._rows() if self._operations[row.member].backward is backward]
            tokens, sequences = tokens + sum(row.length for row in rows), sequences + len(rows)
            batches = self._executor.split(rows, token_budget=self._token_budget)
            attempts = self._executor.compute(self._micro_batches, batches, backward=backward)
            for batch, attempt in zip(batches, attempts, strict=True):
                self._take(batch, attempt, backward=backward)
        for operation, count, sums in zip(self._operations, self._counts, self._sums, strict=True):
            _note(operation, count, sums)
        seconds = perf_counter() - started
        # The clocks of micro-batches that run at once add up to more than the time that passes.
        share = seconds / (sum(clocks.all.seconds for clocks in self._clocks) or 1.0)
        return PassReport(
            adapters=len({operation.run for operation in self._operations}),
            sequences=sequences,
            tokens=tokens,
            padded_tokens=self._padded,
            seconds=seconds,
            low_rank_seconds=share * sum(clocks.low_rank.seconds for clocks in self._clocks),
            loss_seconds=share * sum(clocks.loss.seconds for clocks in self._clocks),
        )

    def _rows(self) -> list[Row]:
        return [
            Row(member, number, len(operation.batch.data[number].tokens))
            for member, (operation, count) in enumerate(zip(self._operations, self._counts, strict=True))
            for number in range(operation.computed, operation.computed + count)
        ]

    def _take(self, rows: list[Row], attempt: Attempt, *, backward: bool) -> None:
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
            (again,) = self._executor.compute(self._micro_batches, [alone], backward=backward)
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

    def _add(self, share: Share, loss: float, values: np.ndarray, gradient: Tensor | None) -> None:
        sums, at = self._sums[share.member], 0
        for row in share.rows:
            targets = self._operations[row.member].batch.data[row.datum].targets
            sums.logprobs[row.datum] = values[at : at + targets.size].reshape(targets.shape).copy()
            at += targets.size
        sums.loss += loss
        sums.gradient = gradient if sums.gradient is None or gradient is None else sums.gradient + gradient


def _note(operation: PassOperation, count: int, sums: _Sums) -> None:
    """Add the pass's part to the operation; an error ends it."""
    if sums.error is not None:
        operation.outcome, operation.gradient = sums.error, None
        return
    first = operation.computed
    operation.logprobs += [sums.logprobs[number] for number in range(first, first + count) if number in sums.logprobs]
    operation.loss += sums.loss
    if sums.gradient is not None:
        # A copy of its own: the pass's gradients of all members are one tensor.
        operation.gradient = sums.gradient.clone() if operation.gradient is None else operation.gradient + sums.gradient
    operation.computed += count
