"""Protocol of the trainer's own forward: the numbers that a replica's are compared with, and scores of prompts.

Two implementations, both in ``workers``: over a base model in this process, and over one in a process of its own.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.sampling.replica import UNSCALED, AdapterVersion, Draws, PromptScored, PromptScoring


@dataclass(frozen=True, slots=True)
class HandshakeAdapter:
    """A random adapter on the projections called ``projection`` ("o_proj"); "" stands for every projection."""

    projection: str
    version: AdapterVersion


@dataclass(frozen=True, slots=True)
class HandshakeAdapters:
    """Random adapters of one base: the first is on every projection, each other on one kind. ``dtype``: the base's."""

    dtype: str
    adapters: Sequence[HandshakeAdapter]


class TrainerForward(Protocol):
    """Forward passes by the trainer's code over one base model. Usable on one event loop."""

    async def score(
        self,
        adapter: AdapterVersion | None,
        prompt: NDArray[np.int64],
        scoring: PromptScoring,
        draws: Draws = UNSCALED,
        *,
        first: bool = False,
    ) -> PromptScored:
        """Return the scores of ``prompt``, int64 (P,), under ``adapter``; None is the bare base.

        ``draws``: those of the alternatives. ``first``: it is scored before prompts that wait. A prompt that waits is
        dropped when the call is cancelled.
        Raises ``InvalidRequest`` for an adapter that does not fit the base, ``EngineFailure`` when it cannot be computed.
        """

    async def handshake_adapters(self, folder: Path, *, rank: int, with_head: bool) -> HandshakeAdapters:
        """Write random adapters into folders of ``folder`` and return them. Equal arguments write equal bytes.

        Without ``with_head`` none is on the output head. Raises ``InvalidRequest`` and ``EngineFailure``.
        """

    def held(self) -> AbstractContextManager[None]:
        """Keep the base in memory inside the context, even while there is nothing to compute."""

    def check(self) -> None:
        """Raise ``ProcessMustEnd`` when the device that computes the forward in this process has failed."""

    async def close(self) -> None:
        """Free the resources. Safe to repeat."""
