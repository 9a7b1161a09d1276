"""The positions that a micro-batch may have on this device, as learned from micro-batches that found no memory."""

import logging
from collections.abc import Sequence

from engine.training.micro_batch import LEAST_POSITIONS, PackedRow, padded_tokens, split_rows

log = logging.getLogger(__name__)


class MicroBatchMemory:
    """Most positions of a micro-batch of several rows. There is no bound until one finds no memory. For any thread."""

    def __init__(self) -> None:
        self.most: int | None = None
        """Most positions, padding included; None: no bound is known."""

    def cut(self, batches: Sequence[list[PackedRow]]) -> list[list[PackedRow]]:
        """Return the micro-batches, those beyond the bound cut into several. A single row may be longer."""
        if (most := self.most) is None:
            return list(batches)
        return [
            part
            for batch in batches
            for part in ([batch] if padded_tokens(batch) <= most else split_rows(batch, token_budget=most))
        ]

    def learn(self, rows: Sequence[PackedRow]) -> None:
        """Let no later micro-batch be larger than these rows, the larger half of one that found no memory: both halves fitted.

        The bound stays for the life of the process: each try that fails costs everybody a pass. A half that fails teaches
        nothing: memory may be short for a moment, or one sequence too long.
        """
        fitted = max(LEAST_POSITIONS, padded_tokens(rows))
        if self.most is None or fitted < self.most:
            self.most = fitted
            log.warning(
                "micro-batches have at most %d positions from now on: set WEFT_PASS_TOKEN_BUDGET to it, or "
                "WEFT_GRADIENT_CHECKPOINTING, to find no lack of memory after the next start",
                fitted,
            )
